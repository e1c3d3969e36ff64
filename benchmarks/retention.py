"""What old rows cost on PostgreSQL: 10,000,000 stream events, and 200,000 deliveries with an attempt each.

A week of events that has a partition is dropped; beside it a tenth of a week in the default partition, whose rows are
deleted. Then the events of new runs are written and read, beside the same in an empty database. WAL are the bytes that
the server writes for its log, its replicas and its backups.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks retention``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import psycopg

from benchmarks.harness import Metric, cpu_seconds, django_database, report
from tests.stack import postgres

WEEKS, RUNS_A_WEEK, EVENTS_A_RUN = 6, 20_000, 83
DELIVERIES = 200_000
ROUNDS, CALLS = 10, 1000
DATA = '{"runId":"run_01kb5w3v2m8x4c9z6t7q0r1s2d","messageId":"msg_01kb5w3v2m8x4c9z6t7q0r1s2d","text":"a few words"}'
RUNS = """
    INSERT INTO runs_run SELECT copied.* FROM runs_run original, generate_series(1, %(rows)s) n, jsonb_populate_record(
        NULL::runs_run, to_jsonb(original) || jsonb_build_object('id', %(prefix)s || lpad(n::text, 16, '0'))
    ) copied WHERE original.id = %(original)s
"""
EVENTS = f"""
    INSERT INTO runs_runevent (run_id, index, type, data, final)
    SELECT %(prefix)s || lpad(n::text, 16, '0'), index, 'message.delta', '{DATA}', index = {EVENTS_A_RUN}
    FROM generate_series(1, %(rows)s) n, generate_series(1, {EVENTS_A_RUN}) index
"""
DELIVERED = """
    INSERT INTO webhooks_delivery SELECT copied.* FROM webhooks_delivery original, generate_series(1, %(rows)s) n,
    jsonb_populate_record(NULL::webhooks_delivery, to_jsonb(original) || jsonb_build_object(
        'id', 'dlv_' || lpad(n::text, 26, '0'), 'event_id', 'evt_' || lpad(n::text, 26, '0')
    )) copied
"""
ATTEMPTED = """
    INSERT INTO webhooks_attempt (delivery_id, number, started_at, duration_ms, status_code, answer)
    SELECT id, 1, created_at, 5, 200, 'ok' FROM webhooks_delivery
"""
WRITE = "INSERT INTO runs_runevent (run_id, index, type, data, final) VALUES " + ", ".join(
    ["(%s, %s, 'message.delta', %s, false)"] * 5
)
READ = "SELECT index, type, data, final FROM runs_runevent WHERE run_id = %s AND index > %s ORDER BY index LIMIT 200"


class Database:
    """A connection of its own, which commits each statement."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def execute(self, sql: str, **values: object) -> None:
        self.connection.execute("SET session_replication_role = replica")  # without the check of each foreign key
        self.connection.execute(sql, values)
        self.connection.execute("SET session_replication_role = origin")

    def cost(self, work: Callable[[], int]) -> str:
        """The time and the WAL of the work."""
        self.connection.execute("CHECKPOINT")
        (before,) = self.connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ("",)
        begun = time.perf_counter()
        work()
        took = time.perf_counter() - begun
        (written,) = self.connection.execute("SELECT pg_current_wal_lsn() - %s::pg_lsn", [before]).fetchone() or (0,)
        return f"{took * 1000:,.0f} ms, {float(written) / 1e6:,.2f} MB of WAL"

    def append(self, run_ids: list[str]) -> float:
        """The server's CPU for five events of each run, in seconds."""
        return self._cpu(WRITE, [[value for index in range(1, 6) for value in (key, index, DATA)] for key in run_ids])

    def read(self, run_ids: list[str]) -> float:
        """The server's CPU for the page of events that a stream reads first."""
        return self._cpu(READ, [[key, 0] for key in run_ids])

    def _cpu(self, sql: str, calls: list[list[Any]]) -> float:
        begun = cpu_seconds([self.connection.info.backend_pid])
        for values in calls:
            self.connection.execute(sql, values, prepare=False)
        return cpu_seconds([self.connection.info.backend_pid]) - begun


def measure() -> list[Metric]:
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection

    from config.kernel import clock
    from config.kernel.ids import first_id
    from runs.streams import prune
    from tests import factories
    from webhooks.tasks import prune as prune_webhooks

    call_command("migrate", verbosity=0)
    settings.RUN_EVENT_RETENTION_DAYS = 7 * (WEEKS - 1)  # the oldest week is due
    now = clock.now()
    for weeks in (WEEKS, WEEKS - 4):
        prune.EVENTS.create_ahead(now - timedelta(weeks=weeks))
    this_week = next(week for week in reversed(prune.EVENTS.weeks()) if week <= now)
    past = now - timedelta(weeks=WEEKS + 2)
    run = factories.RunFactory(finished_at=past)
    big = Database(os.environ["DATABASE_URL"])

    def fill(week: datetime, runs: int = RUNS_A_WEEK) -> None:
        big.execute(RUNS, rows=runs, prefix=first_id("run", week), original=run.pk)
        if week < this_week:
            big.execute(EVENTS, rows=runs, prefix=first_id("run", week))

    young = first_id("run", this_week)
    fill(this_week)
    connection.close()
    big.connection.close()
    empty = Database(postgres.create_database(os.environ["TEST_DATABASE_URL"], connection.settings_dict["NAME"]))
    big = Database(os.environ["DATABASE_URL"])
    for number in range(1, WEEKS + 1):
        fill(this_week - number * prune.WEEK)
    big.execute("VACUUM ANALYZE runs_run, runs_runevent")
    written, found = [], []
    for number in range(ROUNDS):
        some = [f"{young}{key:016}" for key in range(number * CALLS + 1, (number + 1) * CALLS + 1)]
        written.append([database.append(some) for database in (big, empty)])
        found.append([database.read(some) for database in (big, empty)])
    dropped = big.cost(prune.prune)
    fill(this_week - (WEEKS + 1) * prune.WEEK, RUNS_A_WEEK // 10)
    deleted = f"{big.cost(prune.prune)} (a tenth, row by row)"
    factories.DeliveryFactory(finished_at=past, created_at=past)
    big.execute(DELIVERED, rows=DELIVERIES)
    big.execute(ATTEMPTED)
    big.execute("VACUUM ANALYZE webhooks_delivery, webhooks_attempt")
    pruned = big.cost(prune_webhooks)
    name = empty.connection.info.dbname
    empty.connection.close()
    postgres.drop_database(postgres.with_database(os.environ["TEST_DATABASE_URL"], name))
    return [
        Metric(f"prune of a week of {RUNS_A_WEEK * EVENTS_A_RUN:,} events", dropped, deleted),
        beside_empty("5 events of a new run written", written),
        beside_empty("5 events of a run read", found),
        Metric(f"prune of {DELIVERIES:,} deliveries with an attempt each", pruned),
    ]


def beside_empty(name: str, rounds: list[list[float]]) -> Metric:
    big, empty = (sum(column) / (ROUNDS * CALLS) * 1e6 for column in zip(*rounds, strict=True))
    return Metric(name, f"{big:.0f} µs of CPU", f"{empty:.0f} µs (empty database)", big / empty, "≤ 1.1")


def main() -> None:
    with django_database():
        report(f"Retention, {WEEKS * RUNS_A_WEEK * EVENTS_A_RUN:,} stream events", measure())
