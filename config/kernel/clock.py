"""The service's only clock: the clock of the database server.

Processes on many machines compare leases, expiries and due times, and the clock of a machine may be wrong. Each
process therefore reads the database's time at intervals and adds the time of its own monotonic clock. No other
module reads the wall clock for a stored time.
"""

import threading
import time
from datetime import UTC, datetime, timedelta

from django.db import connection
from django.utils import timezone

RESYNC_SECONDS = 30.0

_lock = threading.Lock()
_synced_at: float | None = None
_base: datetime | None = None


def now() -> datetime:
    """The database's time in UTC. It costs a process at most one query per ``RESYNC_SECONDS``. SQLite needs no query:
    its clock is the clock of the machine.
    """
    base, synced_at = _base, _synced_at
    if base is None or synced_at is None or time.monotonic() - synced_at > RESYNC_SECONDS:
        return sync()
    return base + timedelta(seconds=time.monotonic() - synced_at)


def sync() -> datetime:
    """Read the database's time now and return it.

    A process with an event loop calls this from a thread more often than ``RESYNC_SECONDS``, so that ``now`` never
    queries on the event loop.
    """
    if connection.vendor != "postgresql":
        return timezone.now()
    global _synced_at, _base
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        base = cursor.fetchone()[0]
    with _lock:
        _base, _synced_at = base, time.monotonic()
    return base


def iso(moment: datetime | None) -> str | None:
    """UTC in the format ``2026-11-20T12:34:56.789Z``; None for None."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[: -len("+00:00")] + "Z"
