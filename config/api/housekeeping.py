"""What beat's jobs have in common: they work in batches, end early when the worker stops, and say how they went.

A job may be started twice at once, or broken off anywhere: each batch is a transaction that skips what another holds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import signals
from django.db import connection, transaction
from django.db.models import QuerySet

from config.api import clock, metrics

logger = logging.getLogger(__name__)

BATCH = 1000

rows_done = metrics.Counter("housekeeping_rows", "Rows that housekeeping has seen to.", ["job"])
failures = metrics.Counter("housekeeping_failures", "Housekeeping jobs that broke.", ["job"])
last_success = metrics.Latest(
    "housekeeping_last_success_timestamp_seconds", "When the job last ended well, in seconds since the epoch.", ["job"]
)

stopping = threading.Event()


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


def in_batches(step: Callable[[], int]) -> int:
    """Repeat ``step``, which returns how many rows it dealt with, until it finds none or this process is to end."""
    done = 0
    while not stopping.is_set() and (count := step()):
        done += count
    return done


def take_batch(rows: QuerySet[Any], size: int = BATCH) -> list[Any]:
    """The keys of some of ``rows``, locked until the transaction ends, without those that another holds."""
    skip = connection.features.has_select_for_update_skip_locked
    return list(
        rows.select_for_update(skip_locked=skip, of=("self",) if skip else ()).values_list("pk", flat=True)[:size]
    )


def delete_batch(rows: QuerySet[Any], size: int = BATCH) -> int:
    """Delete some of ``rows``, to which nothing refers. Returns how many."""
    with transaction.atomic():
        keys = take_batch(rows, size)
        if keys:
            delete_rows(rows.model._base_manager.filter(pk__in=keys))
    return len(keys)


def delete_rows(rows: QuerySet[Any]) -> int:
    """In one statement, without looking for what refers to them: the database refuses if anything does."""
    deleted: int = rows._raw_delete(rows.db)
    return deleted


@signals.worker_shutting_down.connect(dispatch_uid="config.api.housekeeping")
def stop(**kwargs: Any) -> None:
    stopping.set()
