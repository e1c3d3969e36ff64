"""The service's one clock: the database server's.

Leases, expiries and due times are compared by processes on many machines, some with a wrong clock. Each process
therefore asks the database for the time now and then, and counts on from there with its monotonic clock.
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
    """The database's time, UTC. At most one query in ``RESYNC_SECONDS`` a process; none on SQLite, which has no other
    clock.
    """
    base, synced_at = _base, _synced_at
    if base is None or synced_at is None or time.monotonic() - synced_at > RESYNC_SECONDS:
        return sync()
    return base + timedelta(seconds=time.monotonic() - synced_at)


def sync() -> datetime:
    """Ask the database now. Processes with an event loop do so from a thread, so often that ``now`` never has to."""
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
    """``2026-11-20T12:34:56.789Z``, or None."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[: -len("+00:00")] + "Z"
