"""Work in batches: each is a transaction and skips locked rows, so jobs may run twice at once and end at any point."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from django.db import connection, transaction
from django.db.models import Model, Q, QuerySet

BATCH = 1000

stopping = threading.Event()


def in_batches(step: Callable[[], int]) -> int:
    """The sum of what ``step`` returns, the number of rows it processed, until that is 0 or ``stopping`` is set."""
    done = 0
    while not stopping.is_set() and (count := step()):
        done += count
    return done


def in_order(rows: QuerySet[Any], field: str, size: int = BATCH) -> Iterator[Any]:
    """The keys of ``rows`` in the order of ``field``, which must not be null, read ``size`` at a time. Each batch
    begins after the last one, so rows that stay in ``rows`` do not hide those after them.
    """
    after = Q()
    while batch := list(rows.filter(after).order_by(field, "pk").values_list("pk", field)[:size]):
        yield from (key for key, _ in batch)
        key, value = batch[-1]
        after = Q(**{f"{field}__gte": value}) & (Q(**{f"{field}__gt": value}) | Q(pk__gt=key))


def _limit(name: str, seconds: float) -> None:
    """In this transaction, a statement that runs or waits for a lock longer than this fails. PostgreSQL only."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config(%s, %s, true)", [name, f"{seconds * 1000:.0f}ms"])


limit_lock_wait = partial(_limit, "lock_timeout")
limit_statements = partial(_limit, "statement_timeout")


def take_batch(rows: QuerySet[Any], size: int = BATCH, *, to_delete: bool = False) -> list[Any]:
    """The keys of at most ``size`` of ``rows``, locked until the transaction ends. Locked rows are skipped;
    ``to_delete`` also skips rows to which a new row of another transaction refers.
    """
    skip = connection.features.has_select_for_update_skip_locked
    locked = rows.select_for_update(no_key=not to_delete, skip_locked=skip, of=("self",) if skip else ())
    return list(locked.values_list("pk", flat=True)[:size])


def delete_batch(rows: QuerySet[Any], size: int = BATCH) -> int:
    """Delete at most ``size`` of ``rows``, to which no rows refer. Returns the number of deleted rows."""
    with transaction.atomic():
        keys = take_batch(rows, size, to_delete=True)
        return delete_rows(rows.model, rows.model._meta.pk.column, keys)


def delete_rows(model: type[Model], column: str, values: Sequence[Any]) -> int:
    """Delete the rows whose ``column`` has one of ``values``. Unlike ``QuerySet.delete``, looks for no references."""
    if not values:
        return 0
    with connection.cursor() as cursor:
        marks = ", ".join(["%s"] * len(values))
        cursor.execute(f'DELETE FROM "{model._meta.db_table}" WHERE "{column}" IN ({marks})', list(values))  # noqa: S608
        return int(cursor.rowcount)
