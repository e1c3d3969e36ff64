"""Work in batches: each is one transaction that skips rows which another process holds.

A job may be started twice at once, or be broken off anywhere; it ends early once ``stopping`` is set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connection, transaction
from django.db.models import Model, QuerySet

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
            delete_rows(rows.model, rows.model._meta.pk.column, keys)
    return len(keys)


def delete_rows(model: type[Model], column: str, values: Sequence[Any]) -> int:
    """Delete the rows whose ``column`` has one of ``values``, by one statement. Returns how many.

    Unlike ``QuerySet.delete`` it does not look for rows that refer to them: the database refuses if there are any.
    """
    if not values:
        return 0
    quote = connection.ops.quote_name
    with connection.cursor() as cursor:
        marks = ", ".join(["%s"] * len(values))
        cursor.execute(f"DELETE FROM {quote(model._meta.db_table)} WHERE {quote(column)} IN ({marks})", list(values))  # noqa: S608
        return int(cursor.rowcount)
