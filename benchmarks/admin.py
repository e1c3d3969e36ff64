"""The time of each admin page with a million runs, chats, charges and deliveries, on PostgreSQL.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks admin``. The variable RUNS sets the number.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from benchmarks.harness import Metric, report
from tests.stack import postgres

RUNS = int(os.environ.get("RUNS", "1000000"))
USERS = 2000
BUSIEST = 0.1  # the share of one user
DAYS = 30
REPEATS = 7
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
CODES = ["MODEL_ERROR", "MODEL_TIMEOUT", "INSUFFICIENT_CREDITS", "RUN_TIMEOUT", "WORKER_LOST"]
TOOLS = [None, None, "draw_chart", "web_fetch", "calculate", "create_file"]
MODELS, AGENTS = ["demo", "gpt", "claude"], [None, None, "support", "sales"]


def id_of(prefix: str, moment: datetime, number: int) -> str:
    milliseconds, text = int(moment.timestamp() * 1000), ""
    for _ in range(10):
        milliseconds, digit = divmod(milliseconds, 32)
        text = ALPHABET[digit] + text
    return f"{prefix}_{text}{number:016d}"


def fill(database_url: str, users: list[int], endpoints: list[str]) -> tuple[str, str]:
    """Write the rows. Returns the ids of a run in the middle and of its chat."""
    rng = random.Random(4)
    end = datetime.now(UTC)
    begin = end - timedelta(days=DAYS)
    moments = [begin + (end - begin) * (number / RUNS) for number in range(RUNS)]
    owners = [users[0] if rng.random() < BUSIEST else rng.choice(users) for _ in range(RUNS)]
    codes = [rng.choice(CODES) if rng.random() < 0.05 else None for _ in range(RUNS)]
    place = dict(zip(users, endpoints, strict=True))

    def ids(prefix: str, number: int) -> str:
        return id_of(prefix, moments[number], number)

    def chats() -> Iterator[tuple[Any, ...]]:
        for n in range(RUNS):
            yield ids("chat", n), owners[n], moments[n], moments[n]

    def runs() -> Iterator[tuple[Any, ...]]:
        for n in range(RUNS):
            status = "failed" if codes[n] else "waiting" if n % 5000 == 0 else "completed"
            done = None if status == "waiting" else moments[n] + timedelta(seconds=4)
            yield (ids("run", n), ids("chat", n), owners[n], status, codes[n], ids("msg", n), moments[n], done, False,
                   False, 0, False, 0, 0, 0, "", rng.choice(AGENTS), "{}", 0, 0, 0, 0, 0, 0)  # fmt: skip

    def entries() -> Iterator[tuple[Any, ...]]:
        """A charge of each run: its hold, what is charged, and the rest, which is released."""
        for n in range(RUNS):
            tool, hold = rng.choice(TOOLS), id_of("led", moments[n], 3 * n)
            common = (tool, ids("chat", n), ids("run", n))
            price = json.dumps({"model": rng.choice(MODELS)})
            for number, (kind, amount) in enumerate((("HOLD", 700_000), ("CAPTURE" if tool else "USAGE", 500_000),
                                                     ("RELEASE", 200_000))):  # fmt: skip
                yield (id_of("led", moments[n], 3 * n + number), owners[n], kind, amount, *common,
                       f"{kind}:{n}", "", moments[n], hold if number else None, price)  # fmt: skip

    def deliveries() -> Iterator[tuple[Any, ...]]:
        for n in range(RUNS):
            status = "DEAD" if n % 500 == 0 else "DELIVERED"
            yield (ids("dlv", n), ids("evt", n), place[owners[n]], owners[n], "agent.completed", ids("run", n),
                   ids("chat", n), "{}", status, 1, moments[n], moments[n])  # fmt: skip

    tables: list[tuple[str, str, Callable[[], Iterator[tuple[Any, ...]]]]] = [
        ("chats_chat", "id, user_id, created_at, updated_at", chats),
        ("runs_run", "id, chat_id, user_id, status, error_code, user_message_id, created_at, finished_at, blocked, "
         "throttled, last_stream_index, unrecorded_text, ran_ms, lease_token, lease_losses, request_id, agent_name, "
         "metadata, tool_invocation_count, input_tokens, cached_input_tokens, output_tokens, turn_count, model_retries",
         runs),
        ("credits_ledgerentry", "id, account_id, type, amount, tool_key, chat_id, run_id, cause, reason, created_at, "
         "against_id, price", entries),
        ("webhooks_delivery", "id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, body, status, "
         "attempt_count, created_at, finished_at", deliveries),
    ]  # fmt: skip
    with psycopg.connect(database_url, autocommit=True) as connection:
        for number, (table, columns, rows) in enumerate(tables, 1):
            print(f"{number}/{len(tables)} {table}: {RUNS:,} rows", file=sys.stderr, flush=True)
            # Finished deliveries have no due time, but the column's default would set one.
            if table == "webhooks_delivery":
                connection.execute("ALTER TABLE webhooks_delivery ALTER next_attempt_at DROP DEFAULT")
            with connection.cursor().copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
                for row in rows():
                    copy.write_row(row)
        connection.execute("VACUUM ANALYZE")
    middle = RUNS // 2
    return ids("run", middle), ids("chat", middle)


def main() -> None:
    server = os.environ["TEST_DATABASE_URL"]
    database = postgres.create_database(server)
    with tempfile.TemporaryDirectory() as var:
        os.environ |= {
            "DATABASE_URL": database,
            "REDIS_URL": os.environ["TEST_REDIS_URL"],
            "VAR_DIR": var,
            "ADMIN_DASHBOARD_SECONDS": "0",
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "ALLOWED_HOSTS": "testserver",
        }
        try:
            measure(database)
        finally:
            from django.db import connections

            connections.close_all()
            postgres.drop_database(database)


STAFF_INDEXES = ("run_by_status", "run_by_error")
LIFE = """
    INSERT INTO runs_run (id, chat_id, user_id, status, user_message_id, created_at, blocked, throttled,
        last_stream_index, unrecorded_text, ran_ms, lease_token, lease_losses, request_id, metadata,
        tool_invocation_count, input_tokens, cached_input_tokens, output_tokens, turn_count, model_retries)
    SELECT 'run_z' || substr(id, 6), chat_id, user_id, 'queued', user_message_id, now(), false, false, 1, false, 0, 0,
        0, '', '{}', 0, 0, 0, 0, 0, 0
        FROM (SELECT * FROM runs_run WHERE status = 'completed' ORDER BY id DESC LIMIT %(rows)s) AS newest;
    UPDATE runs_run SET status = 'running', started_at = now() WHERE id >= 'run_z';
    UPDATE runs_run SET status = 'completed', finished_at = now() WHERE id >= 'run_z'
"""
LIVES = 20_000


def lives(database: str) -> Metric:
    """The cost per run of the indexes that only the admin uses.

    Rows are inserted, started and ended in bulk, so that only the database's work is measured. The best of five pairs
    counts, because other work on the machine can only add time.
    """

    def seconds(drop: bool) -> float:
        with psycopg.connect(database) as connection:
            if drop:
                connection.execute(f"DROP INDEX {', '.join(STAFF_INDEXES)}")
            begun = time.perf_counter()
            for statement in LIFE.split(";"):
                connection.execute(statement, {"rows": LIVES})
            took = time.perf_counter() - begun
            connection.rollback()
        return took

    seconds(False)
    pairs = [(seconds(False), seconds(True)) for _ in range(5)]
    kept, without = (min(column) / LIVES * 1e6 for column in zip(*pairs, strict=True))
    name = "a run's row inserted, started and ended, with the admin's two indexes"
    return Metric(name, f"{kept:.0f} µs", f"{without:.0f} µs without them", kept / without)


def measure(database: str) -> None:
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    from credits.models import Account
    from webhooks.models import Endpoint

    call_command("migrate", verbosity=0)
    User.objects.bulk_create(User(username=f"user{n}", email=f"user{n}@example.com") for n in range(USERS))
    users = list(User.objects.order_by("pk"))
    Account.objects.bulk_create(Account(user=user) for user in users)
    endpoints = Endpoint.objects.bulk_create(Endpoint(user=user, url="https://x.example", secret="x") for user in users)
    run, chat = fill(database, [user.pk for user in users], [endpoint.pk for endpoint in endpoints])
    client = Client()
    client.force_login(User.objects.create_superuser("boss", "boss@example.com", "x"))

    def page(url: str, name: str, target: float) -> Metric:
        took, inside = [], []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            with CaptureQueriesContext(connection) as asked:
                answer = client.get(url)
            took.append(time.perf_counter() - begun)
            assert answer.status_code == 200, url
            inside.append(sum(float(query["time"]) for query in asked.captured_queries))
        middle = statistics.median(took)
        value = f"{middle * 1000:.0f} ms, of it {statistics.median(inside) * 1000:.0f} ms in the database"
        empty = statistics.median(idle) * 1000
        return Metric(name, value, f"{empty:.0f} ms an empty list", middle * 1000 / empty, f"≤ {target:g} s")

    idle = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        client.get("/admin/chats/attachment/")
        idle.append(time.perf_counter() - begun)
    runs = "/admin/runs/run/"
    metrics = [
        page(runs, "list of runs", 1),
        page(f"{runs}?p=200", "its last page (10,000 rows on)", 1),
        page(f"{runs}?q={run}", "a run by its id", 1),
        page(f"{runs}?q={chat}", "by its chat", 1),
        page(f"{runs}?q=user7", "by user", 1),
        page(f"{runs}?q=user0", "by the user who has a tenth of all", 1),
        page(f"{runs}?q=user0@example.com", "by e-mail address", 1),
        page(f"{runs}?q=WORKER_LOST", "by error", 1),
        page(f"{runs}?q=user0+WORKER_LOST", "by user and error", 1),
        page(f"{runs}?status__exact=waiting", "by a rare state", 1),
        page(f"{runs}{run}/change/", "a run's page", 1),
        page(f"/admin/credits/ledgerentry/?q={run}", "its ledger rows", 1),
        page("/admin/credits/ledgerentry/", "the ledger with folded holds", 1),
        page(f"/admin/credits/ledgerentry/?account__user__id__exact={users[7].pk}", "a user's ledger", 1),
        page("/admin/credits/ledgerentry/?type__exact=REFUND", "ledger rows of a type without rows", 1),
        page(f"/admin/webhooks/delivery/?q={run}", "its deliveries", 1),
        page("/admin/webhooks/delivery/?status__exact=DEAD", "dead deliveries", 1),
        page("/admin/", "dashboard, without its cache", 3),
        page(f"/admin/people/{users[7].pk}/", "a user's page", 1),
        page(f"/admin/people/{users[0].pk}/", "the page of the user who has a tenth of all", 1),
        page("/admin/find/?q=use", "users whose names begin so", 1),
        *(
            page(f"/admin/runs/run/reports/?by={name}&days=90", f"report by {name}, all {DAYS} days", 5)
            for name in ("user", "tool", "model", "agent")
        ),
    ]
    metrics.append(lives(database))
    report(f"The admin at {RUNS:,} runs, chats, charges and deliveries", metrics)
