"""Each paginated list with 100,000 rows of a user, compared with 100 rows of another user, on PostgreSQL.

The last line is the CPU of a page of runs that have many tool calls.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks lists``.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import time
from datetime import datetime
from typing import Any

import psutil
import psycopg
from psycopg import sql

from benchmarks.harness import Connection, Metric, cpu_seconds, milliseconds, report, wait_until
from tests.stack.stack import Stack

ROWS = {"light": 100, "heavy": 100_000}
REQUESTS = 150
# The share of the list before the page.
PAGES = {"first page": 0.0, "page in the middle": 0.5, "last pages": 0.99}
# The columns that differ between the copies of a real run's row. Each copy is one second older than the one before.
COPIES = {
    "chats_chat": {"id": "'chat_' || {key}"},
    "chats_message": {"id": "'msg_' || {key}"},
    "runs_run": {"id": "'run_' || {key}"},
    "webhooks_delivery": {"id": "'dlv_' || {key}", "event_id": "'evt_' || {key}"},
    "credits_ledgerentry": {"id": "'led_' || {key}", "cause": "'benchmark:' || {key}", "run_id": "'run_' || {key}"},
}
COPY = """
    INSERT INTO {table} SELECT copied.* FROM {table} original, generate_series(1, %(rows)s) n, jsonb_populate_record(
        NULL::{table},
        to_jsonb(original) || jsonb_build_object('created_at', original.created_at - n * interval '1 second', {changes})
    ) copied
    WHERE original.id = %(original)s
"""
# The most calls that a run may have, each with its hold and its charge in the ledger.
CALLS = """
    INSERT INTO runs_toolinvocation (
        id, run_id, turn_index, call_index, tool_call_id, name, node_type, input, status, credit_estimate, repeatable,
        credit_used, result, result_urls, created_at, updated_at
    )
    SELECT replace(run.id, 'run_', '') || n, run.id, 1, n, 'call', 'calculate', 'builtin', '{}', 'COMPLETED', 1, true,
           1, repeat('x', 1000), '[]', now(), now()
    FROM runs_run run, generate_series(1, 1000) n WHERE run.user_id = %(user)s;
    UPDATE runs_run SET tool_invocation_count = 1000 WHERE user_id = %(user)s;
    -- The triggers of the ledger would update one row of the totals for each of these.
    SET session_replication_role = replica;
    INSERT INTO credits_ledgerentry (id, account_id, type, amount, run_id, against_id, cause, reason, created_at)
    SELECT key || row.letter || n, %(user)s, row.type, 1, run.id, CASE row.type WHEN 'CAPTURE' THEN key || 'h' || n END,
           run.id || row.letter || n, '', now()
    FROM runs_run run, replace(run.id, 'run_', '') key, generate_series(1, 1000) n,
         (VALUES ('h', 'HOLD'), ('c', 'CAPTURE')) row(letter, type)
    WHERE run.user_id = %(user)s;
    SET session_replication_role = origin
"""
# Path → the table, and the SQL condition for the rows of the list.
LISTS = {
    "/chats": ("chats_chat", "user_id = {user}"),
    "/chats/{chat}/messages": ("chats_message", "chat_id = '{chat}'"),
    "/chats/{chat}/runs": ("runs_run", "chat_id = '{chat}'"),
    "/runs": ("runs_run", "user_id = {user}"),
    "/runs?status=completed": ("runs_run", "user_id = {user} AND status = 'completed'"),
    "/webhooks/deliveries": ("webhooks_delivery", "user_id = {user}"),
    "/webhooks/deliveries?status=DEAD": ("webhooks_delivery", "user_id = {user} AND status = 'DEAD'"),
    "/me/credits/ledger": (
        "credits_ledgerentry",
        "account_id = {user}",
    ),
}


class Person:
    """A user with ``rows`` rows in each list."""

    def __init__(self, stack: Stack, connection: psycopg.Connection, name: str, rows: int) -> None:
        self.connection = connection
        self.http = Connection(stack.port, stack.token(name))
        # No server listens on this port: each delivery has a failed attempt. It is dead after its endpoint is disabled.
        self.http.json("POST", "/api/v1/webhooks", {"url": "http://127.0.0.1:9/"})
        self.chat = self.http.json("POST", "/api/v1/chats", {})["id"]
        run = self.http.json("POST", f"/api/v1/chats/{self.chat}/runs", {"message": "/usage 10 10\n/say Hello"})["id"]
        wait_until(lambda: self.http.json("GET", f"/api/v1/runs/{run}")["status"] == "completed", 30)
        wait_until(lambda: self.http.json("GET", "/api/v1/webhooks/deliveries")["items"][0]["attempts"] != [], 30)
        self.http.json("PATCH", "/api/v1/webhooks", {"enabled": False})
        self.user = self.one("SELECT user_id FROM runs_run WHERE id = %s", run)
        originals = {
            "chats_chat": self.chat,
            "chats_message": self.one("SELECT user_message_id FROM runs_run WHERE id = %s", run),
            "runs_run": run,
            "webhooks_delivery": self.one("SELECT id FROM webhooks_delivery WHERE run_id = %s LIMIT 1", run),
            "credits_ledgerentry": self.one(
                "SELECT id FROM credits_ledgerentry WHERE run_id = %s AND type = 'HOLD'", run
            ),
        }
        key = f"lpad(n::text, 20, '0') || lpad('{self.user}', 6, '0')"
        for table, changes in COPIES.items():
            made = ", ".join(f"'{column}', {expression.format(key=key)}" for column, expression in changes.items())
            statement = COPY.format(table=table, changes=made)
            connection.execute(statement, {"rows": rows, "original": originals[table]})  # type: ignore[arg-type]

    def one(self, query: str, *values: Any) -> Any:
        row = self.connection.execute(query, values).fetchone()  # type: ignore[arg-type]
        assert row is not None
        return row[0]

    def cursor(self, path: str, share: float) -> str:
        """The cursor of the page after ``share`` of the list."""
        table, condition = LISTS[path]
        mine = sql.SQL(condition.format(user=self.user, chat=self.chat))  # type: ignore[arg-type]
        order = sql.SQL("ASC" if table == "chats_message" else "DESC")
        query = sql.SQL(
            "SELECT created_at, id FROM {table} WHERE {mine} ORDER BY created_at {order}, id {order} LIMIT 1 OFFSET "
            "(SELECT (count(*) * {share})::bigint FROM {table} WHERE {mine})"
        ).format(table=sql.Identifier(table), mine=mine, order=order, share=sql.Literal(share))
        row = self.connection.execute(query).fetchone()
        assert row is not None
        moment: datetime = row[0]
        return base64.urlsafe_b64encode(json.dumps([moment.isoformat(), row[1]]).encode()).decode().rstrip("=")

    def address(self, path: str, share: float) -> str:
        """The path of the page after ``share`` of the list."""
        address = f"/api/v1{path.format(chat=self.chat)}"
        return f"{address}{'&' if '?' in path else '?'}cursor={self.cursor(path, share)}" if share else address

    def read(self, address: str) -> float:
        """The time of a page in seconds."""
        begun = time.perf_counter()
        page = self.http.json("GET", address)
        took = time.perf_counter() - begun
        assert len(page["items"]) == 20, address
        return took


def compare(path: str, light: Person, heavy: Person) -> list[Metric]:
    """Pages of ``heavy`` compared with the first page of ``light``, in turns, because the machine's speed varies."""
    readers = [(light, light.address(path, 0)), *((heavy, heavy.address(path, share)) for share in PAGES.values())]
    took: list[list[float]] = [[] for _ in readers]
    for number in range(REQUESTS + 10):
        for (person, address), times in zip(readers, took, strict=True):
            seconds = person.read(address)
            if number >= 10:
                times.append(seconds)
    baseline = took[0]
    return [
        Metric(
            f"GET {path}, {name} of {ROWS['heavy']}",
            milliseconds(times),
            milliseconds(baseline),
            statistics.median(times) / statistics.median(baseline),
            "≤ 1.5",
        )
        for name, times in zip(PAGES, took[1:], strict=True)
    ]


def page_of_runs(stack: Stack, light: Person, busy: Person) -> Metric:
    """The CPU of the web process and the database for 100 runs of ``busy``, each with the most calls, compared with 100
    runs of ``light`` without calls.
    """
    psycopg.ClientCursor(busy.connection).execute(CALLS, {"user": busy.user})
    busy.connection.execute("VACUUM ANALYZE")
    server = psutil.Process(busy.one("SELECT pg_backend_pid()")).ppid()
    pids = [stack.processes["web"].pid, server]
    used: dict[Person, list[float]] = {light: [], busy: []}
    size = 0
    for _ in range(REQUESTS // 10):
        for person, seconds in used.items():
            begun = cpu_seconds(pids)
            for _ in range(10):
                status, content = person.http.request("GET", "/api/v1/runs?limit=100")
                assert status == 200, content
            seconds.append((cpu_seconds(pids) - begun) / 10)
            size = len(content)
    without, with_calls = (statistics.median(seconds) for seconds in used.values())
    return Metric(
        "GET /runs?limit=100, 1,000 calls a run, CPU of web process and database",
        f"{with_calls * 1000:.1f} ms, {size / 1000:.0f} KB",
        f"{without * 1000:.1f} ms without calls",
        with_calls / without,
        "≤ 50 ms, ≤ 300 KB",
    )


def main() -> None:
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    with (
        Stack(**services) as stack,
        psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True) as connection,
    ):
        people = {name: Person(stack, connection, name, rows) for name, rows in ROWS.items()}
        connection.execute("VACUUM ANALYZE")
        metrics = [metric for path in LISTS for metric in compare(path, people["light"], people["heavy"])]
        metrics.append(page_of_runs(stack, people["light"], Person(stack, connection, "busy", 99)))
    report("lists", metrics)


if __name__ == "__main__":
    main()
