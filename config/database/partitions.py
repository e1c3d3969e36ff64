"""Tables that PostgreSQL divides by the week in which an id was made, so that old rows are dropped and not deleted.

A migration makes the table and its default partition, which takes the rows of weeks without a partition of their own.
SQLite has plain tables, for which there is nothing to do here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from django.conf import settings
from django.db import OperationalError, connection, transaction

from config.database.batches import limit_lock_wait

logger = logging.getLogger(__name__)

WEEK = timedelta(days=7)
# So long may the periodic job be away before rows are added to the default partition.
WEEKS_AHEAD = 3
LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True, slots=True)
class WeeklyPartitions:
    """The partitions of ``table`` by ``column``, which has ids of rows of ``referenced``. ``first_id`` returns a text
    that sorts before all ids of its argument and later.

    A week is named by its Monday, 0:00 UTC.
    """

    table: str
    column: str
    first_id: Callable[[datetime], str]
    referenced: str

    def weeks(self) -> list[datetime]:
        """The weeks that have a partition, oldest first."""
        if connection.vendor != "postgresql":
            return []
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT right(relname, 8) FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid"
                " WHERE inhparent = to_regclass(%s) AND relname ~ '_[0-9]{8}$' ORDER BY 1",
                [self.table],
            )
            return [datetime.strptime(name, "%Y%m%d").replace(tzinfo=UTC) for (name,) in cursor.fetchall()]

    def create_ahead(self, now: datetime) -> int:
        """Create the partitions of the week of ``now`` and the next WEEKS_AHEAD weeks. Returns how many were missing.

        A week that has rows in the default partition gets none: the move of its rows would stop all writers.
        """
        if connection.vendor != "postgresql":
            return 0
        created = 0
        for week in self._missing(now):
            created += _in_short_lock(partial(self._create, week, now))
        return created

    def drop(self, week: datetime) -> bool:
        """Drop the partition of ``week`` with its rows. False if another transaction uses the table for too long."""
        return _in_short_lock(partial(_execute, f"DROP TABLE IF EXISTS {self._name(week)}"))

    def _create(self, week: datetime, now: datetime) -> None:
        # The new partition's foreign key locks the referenced table. Other transactions use that table first, so this
        # order causes no deadlock. It also makes a second process wait.
        _execute(f"LOCK TABLE {self.referenced} IN EXCLUSIVE MODE")
        if week in self._missing(now):
            low, high = self.first_id(week), self.first_id(week + WEEK)
            _execute(
                f"CREATE TABLE {self._name(week)} PARTITION OF {self.table} FOR VALUES FROM ('{low}') TO ('{high}')"
            )

    def _missing(self, now: datetime) -> list[datetime]:
        now, known = now.astimezone(UTC), self.weeks()
        monday = datetime(now.year, now.month, now.day, tzinfo=UTC) - timedelta(days=now.weekday())
        weeks = [monday + number * WEEK for number in range(WEEKS_AHEAD + 1)]
        return [week for week in weeks if week not in known and not self._has_rows_in_default(week)]

    def _has_rows_in_default(self, week: datetime) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT EXISTS (SELECT FROM {self._default()} WHERE {self.column} >= %s AND {self.column} < %s)",  # noqa: S608
                [self.first_id(week), self.first_id(week + WEEK)],
            )
            return bool(cursor.fetchone()[0])

    def _name(self, week: datetime) -> str:
        return f"{self.table}_{week:%Y%m%d}"

    def _default(self) -> str:
        return f"{self.table}_default"


def _in_short_lock(work: Callable[[], None]) -> bool:
    """Whether ``work`` got its locks. While it waits for them, all users of the tables wait behind it."""
    try:
        with transaction.atomic():
            limit_lock_wait(settings.HOUSEKEEPING_LOCK_SECONDS)
            work()
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        logger.info("other transactions use the partitions for too long; the next job tries again")
        return False
    return True


def _execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)
