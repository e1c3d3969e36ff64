"""Work in batches: each is one transaction that skips rows which another process holds.

A job may be started twice at once, or be broken off anywhere; it ends early once ``stopping`` is set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction
from django.db.models import QuerySet

BATCH = 1000

stopping = threading.Event()


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
