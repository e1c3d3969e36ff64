"""What beat's jobs have in common: they work in batches, end early when the worker stops, and say how they went.

A job may be started twice at once, or broken off anywhere: each batch is a transaction that skips what another holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery import signals

from config.database import batches
from config.kernel import clock
from config.telemetry import metrics

logger = logging.getLogger(__name__)

rows_done = metrics.Counter("housekeeping_rows", "Rows that housekeeping has seen to.", ["job"])
failures = metrics.Counter("housekeeping_failures", "Housekeeping jobs that broke.", ["job"])
last_success = metrics.Latest(
    "housekeeping_last_success_timestamp_seconds", "When the job last ended well, in seconds since the epoch.", ["job"]
)


def run(job: str, work: Callable[[], int]) -> int:
    """Do the job and count what it did. ``job`` is its name in CELERY_BEAT_SCHEDULE. Raises what ``work`` raises."""
    try:
        done = work()
    except Exception:
        failures.inc(job)
        raise
    rows_done.inc(job, by=done)
    last_success.set(clock.now().timestamp(), job)
    return done


@signals.worker_shutting_down.connect(dispatch_uid="config.queue.jobs")
def stop(**kwargs: Any) -> None:
    batches.stopping.set()
