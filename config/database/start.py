"""What a process looks for when it has started: the database."""

from __future__ import annotations

import threading

from django.db import connection

from config.database.retry import CONNECTION_ERRORS, outage


def look_for_database() -> None:
    """Log an outage of the database now, and not only when a first request or message needs it. Does not block."""
    threading.Thread(target=_ask, name="database-at-start", daemon=True).start()


def _ask() -> None:
    try:
        connection.ensure_connection()
        outage.ended()
    except CONNECTION_ERRORS as error:
        outage.failed(error)
    finally:
        connection.close()
