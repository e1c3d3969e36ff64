#!/usr/bin/env python
"""Django's command-line entry point."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    from django.core.management import execute_from_command_line
    from django.db import OperationalError, connection

    from config.database.retry import is_unavailable, reason

    try:
        execute_from_command_line(sys.argv)
    except OperationalError as error:
        if connection.vendor != "postgresql" or not is_unavailable(error):
            raise
        sys.exit(f"The database is not available: {reason(error)}")
