#!/usr/bin/env python
"""Django's command-line entry point."""

import atexit
import gc
import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    from config.kernel import garbage

    # Half of the time of a short command were collections, at its start and at its end.
    garbage.collect_less_often()
    atexit.register(gc.freeze)
    from django.core.management import execute_from_command_line
    from django.db import OperationalError, connection

    from config.database.retry import is_unavailable, reason

    try:
        execute_from_command_line(sys.argv)
    except OperationalError as error:
        if connection.vendor != "postgresql" or not is_unavailable(error):
            raise
        sys.exit(f"The database is not available: {reason(error)}")
