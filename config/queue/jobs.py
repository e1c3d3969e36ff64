"""Scheduled jobs: their metrics, and their early end when the worker stops. The apps define the jobs themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signals

from config.database import batches
from config.kernel import clock
from config.telemetry import metrics

rows_done = metrics.Counter("housekeeping_rows", "Rows that housekeeping processed.", ["job"])
failures = metrics.Counter("housekeeping_failures", "Housekeeping jobs that failed.", ["job"])
last_success = metrics.Latest(
    "housekeeping_last_success_timestamp_seconds", "When the job last succeeded, in seconds since the epoch.", ["job"]
)


def run(job: str, work: Callable[[], int]) -> int:
    """Run the job and record its metrics. Returns the number of rows that ``work`` processed.

    ``job`` is its name in CELERY_BEAT_SCHEDULE. Raises the exceptions of ``work``.
    """
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
