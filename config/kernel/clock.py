"""The service's only clock for stored times: that of the database server, because the clocks of machines may differ.
Each process reads the database's time at intervals and adds its own steady clock.
"""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import Error, connection
from django.utils import timezone

# Seconds after which each process reads the database's clock again; in between it adds the time of its machine.
DATABASE_CLOCK_SECONDS = 30
RETRY_SECONDS = 5.0  # after an attempt to read the database's time, in which other threads do not try
ANSWER_SECONDS = 1.0  # an answer that took longer may be old: the process or the network stood still

# On Linux, CLOCK_MONOTONIC stands still while the machine is suspended, and the database's clock does not.
_STEADY_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# The database's time, and the steady clock at that moment. Threads need no lock: what each of them writes is right.
_synced: tuple[datetime, float] | None = None
_next_sync = 0.0


def steady() -> float:
    """Seconds of a clock that is never set, and that also counts the time of a suspended machine."""
    return time.clock_gettime(_STEADY_CLOCK)


def now() -> datetime:
    """The database's time in UTC: one query in DATABASE_CLOCK_SECONDS, and none on a thread with a running event loop.
    While the database is away, the time of the last answer continues. SQLite's clock is that of the machine.
    """
    global _next_sync
    synced = _synced
    if synced is None:
        return timezone.now() if _on_event_loop() else sync()
    if steady() >= _next_sync and not _on_event_loop():
        _next_sync = steady() + RETRY_SECONDS
        try:
            return sync()
        except Error:
            if connection.in_atomic_block:
                raise  # the transaction is lost
            connection.close()
    return synced[0] + timedelta(seconds=steady() - synced[1])


def after(moment: datetime) -> datetime:
    """The present, but later than ``moment``, which another process has stored: answers must not precede questions."""
    return max(now(), moment + timedelta(microseconds=1))


def sync() -> datetime:
    """Read the database's time now and return it. A process with an event loop calls this before the loop begins."""
    if connection.vendor != "postgresql":
        return timezone.now()
    global _synced, _next_sync
    with connection.cursor() as cursor:
        asked = steady()
        cursor.execute("SELECT clock_timestamp()")
        base, answered = cursor.fetchone()[0], steady()
    if _synced is None or answered - asked <= ANSWER_SECONDS:
        # The server read its clock between the two moments. Their middle is wrong by half of the time at most.
        _synced = base, (asked + answered) / 2
        _next_sync = answered + DATABASE_CLOCK_SECONDS
    base, read = _synced
    return base + timedelta(seconds=steady() - read)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def iso(moment: datetime | None) -> str | None:
    """UTC in the format ``2026-11-20T12:34:56.789Z``; None for None."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else None


def moment_of(text: Any, example: str) -> datetime:
    """The time in ISO 8601 with its zone that ``text`` names, in UTC, cut to milliseconds as clients see times. Raises
    ValueError, with a message for people that ends with ``example``.
    """
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        moment = moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"Use a time {example}.") from None
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)
