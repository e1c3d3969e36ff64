"""The time in the database of filtered lists of runs: one user with 1,000,000 runs, on PostgreSQL.

The last line compares the start of a run with 16 pairs of metadata and without.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks filters``.
"""

from __future__ import annotations

import importlib
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Metric, report
from tests.stack import postgres

RUNS, CHATS, ROUNDS = 1_000_000, 20_000, 5
# One run in 1,000 was cancelled. Of the others of the older half, every third failed. The 1,000 oldest have a model, an
# agent and a pair of their own. Every second of the others has an agent, in 500 versions. Every second run has
# metadata: a pair of half of them, and a pair of 10 of them. The runs with kind=good are a third of those with
# metadata, spread over all, and none of them failed or has kind=other.
CHATS_OF = """
    INSERT INTO chats_chat (id, user_id, has_line, created_at, updated_at)
    SELECT 'chat_' || lpad(n::text, 20, '0'), %(user)s, false, now(), now() FROM generate_series(0, %(chats)s - 1) n
"""
COLUMNS = {
    "id": "'run_' || lpad(n::text, 20, '0')",
    "chat_id": "'chat_' || lpad((n %% %(chats)s)::text, 20, '0')",
    "created_at": "original.created_at - (%(runs)s - n) * interval '1 second'",
    "status": """CASE WHEN n %% 1000 = 0 THEN 'cancelled' WHEN n %% 3 = 0 AND n < %(runs)s / 2 THEN 'failed'
        ELSE 'completed' END""",
    "resolved_model": "CASE WHEN n < 1000 THEN 'rare' WHEN n %% 5 = 0 THEN 'large' ELSE 'demo' END",
    "agent_name": "CASE WHEN n < 1000 THEN 'rare' WHEN n %% 2 = 0 THEN 'support' END",
    "agent": "CASE WHEN n < 1000 THEN 'rare@1' WHEN n %% 2 = 0 THEN 'support@' || 1 + n %% 1000 END",
    "metadata": """CASE WHEN n %% 2 = 0 THEN '{}' ELSE jsonb_build_object(
        'env', CASE WHEN n %% 4 = 1 THEN 'prod' ELSE 'test' END, 'customer', (n / 20 %% 50000)::text,
        'kind', CASE WHEN n %% 6 = 1 THEN 'good' ELSE 'other' END, 'place', CASE WHEN n %% 4 = 1 THEN 'a' ELSE 'b' END
    ) || CASE WHEN n < 1000 THEN '{"old": "yes"}' ELSE '{}' END::jsonb END""",
}
PAIRS = """
    INSERT INTO runs_runmetadata (run_id, user_id, key, value, created_at)
    SELECT run.id, run.user_id, pair.key, pair.value, run.created_at
    FROM runs_run run, jsonb_each_text(run.metadata) pair
"""
FILTERS = [
    "",
    "status=completed",
    "status=failed",
    "status=cancelled",
    "status=failed,cancelled",
    "status=queued,running,waiting",
    "model=large",
    "model=rare",
    "model=none",
    "agent=support",
    "agent=support@501",
    "agent=rare",
    "agent=none",
    "createdAfter={middle}",
    "createdBefore={middle}",
    "metadata.env=prod",
    "metadata.env=none",
    "metadata.customer=77",
    "metadata.old=yes",
    "metadata.env=prod&metadata.customer=77",
    "metadata.env=prod&status=completed",
    "metadata.env=prod&status=failed,cancelled",
    "metadata.env=prod&createdBefore={middle}",
    "metadata.customer=77&status=failed",
    "model=demo&status=failed",
    "model=rare&status=failed,completed",
    "agent=support&status=failed",
    "agent=support@501&createdBefore={middle}",
    "agent=rare&status=failed,completed",
    "agent=support&metadata.customer=77",
    "model=large&metadata.env=test&status=completed,failed&createdBefore={middle}",
    "metadata.kind=good&status=failed",
    "metadata.env=prod&metadata.place=b",
    "metadata.env=prod&metadata.place=b&metadata.kind=good&status=failed,completed,cancelled&model=demo",
    "model=rare&status=cancelled&metadata.env=prod",
    "status=queued,running,waiting,completed,failed,cancelled",
]
MIDDLE = RUNS // 2
PAIRS_MOST = {f"{'k' * 30}{number:02}": "v" * 40 for number in range(16)}


class Recorder:
    """Records the statements that are executed while it is installed, and adds up their time."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, Any]] = []
        self.seconds = 0.0

    def __call__(self, execute: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        self.statements.append((sql, parameters))
        begun = time.perf_counter()
        try:
            return execute(sql, parameters, many, context)
        finally:
            self.seconds += time.perf_counter() - begun


def fill(user: Any) -> None:
    from django.db import connection

    from runs.models import Run
    from tests.factories import RunFactory

    original = RunFactory(chat__user=user, finish_reason="stop")
    columns = [field.column for field in Run._meta.concrete_fields]
    values = ", ".join(COLUMNS.get(column, f"original.{column}") for column in columns)
    copies = f"""
        INSERT INTO runs_run ({", ".join(columns)}) SELECT {values}
        FROM runs_run original, generate_series(0, %(runs)s - 1) n WHERE original.id = %(original)s
    """
    sizes = {"user": user.pk, "runs": RUNS, "chats": CHATS, "original": original.pk}
    with connection.cursor() as cursor:
        for statement in (CHATS_OF, copies, PAIRS, "VACUUM ANALYZE"):
            cursor.execute(statement, sizes if "%" in statement else None)


def recorded(act: Callable[[], Any]) -> Recorder:
    from django.db import connection

    recorder = Recorder()
    with connection.execute_wrapper(recorder):
        act()
    return recorder


def in_database(sql: str, parameters: Any) -> float:
    """Milliseconds to plan and to execute the statement, the shortest of ROUNDS."""
    from django.db import connection

    found = []
    for _ in range(ROUNDS):
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF) {sql}", parameters)
            text = "\n".join(line for (line,) in cursor.fetchall())
        found.append(sum(map(float, re.findall(r"^(?:Planning|Execution) Time: ([\d.]+) ms", text, re.MULTILINE))))
    return min(found)


def page(client: Any, query: str) -> float:
    """Milliseconds in the database for a page of runs."""

    def act() -> None:
        answer = client.get(f"/api/v1/runs?{query}")
        if answer.status_code != 200:
            raise RuntimeError(answer.content)

    selects = [statement for statement in recorded(act).statements if "runs_run" in statement[0]]
    return sum(in_database(*select) for select in selects)


def lists(client: Any) -> list[Metric]:
    from config.api.pagination import encode_cursor
    from config.kernel.clock import iso
    from runs.models import Run

    middle = Run.objects.get(pk=f"run_{MIDDLE:020}")
    cursor = encode_cursor(middle.created_at, middle.pk)
    metrics = []
    for query in FILTERS:
        query = query.format(middle=iso(middle.created_at))
        first = page(client, query)
        deep = page(client, f"{query}&cursor={cursor}")
        metrics.append(Metric(f"?{query}", f"first page {first:.1f} ms, in the middle {deep:.1f} ms", target="≤ 20 ms"))
    return metrics


def starts(client: Any) -> Metric:
    from runs.models import Run

    took: dict[int, list[float]] = {0: [], 16: []}
    for _ in range(100):
        for pairs, times in took.items():
            chat = client.post("/api/v1/chats", {}, format="json").json()["id"]
            body = {"message": "Hello", "metadata": PAIRS_MOST if pairs else {}}
            start = partial(client.post, f"/api/v1/chats/{chat}/runs", body, format="json")
            times.append(recorded(start).seconds * 1000)
    without, most = (statistics.median(times) for times in took.values())
    assert Run.objects.filter(metadata__has_key=next(iter(PAIRS_MOST))).count() == 100
    return Metric("POST run with 16 pairs", f"{most:.1f} ms", f"{without:.1f} ms without", most / without)


def measure() -> list[Metric]:
    from django.conf import settings
    from django.core.management import call_command

    from config.queue import nudges
    from tests.factories import UserFactory, session_client

    settings.RATE_LIMIT_SESSION = settings.RATE_LIMIT_RUN_STARTS = 0
    settings.ALLOWED_HOSTS = ["testserver"]
    call_command("migrate", verbosity=0)
    user = UserFactory()
    fill(user)
    client = session_client(user)
    with patch.object(nudges, "nudge"):
        return [*lists(client), starts(client)]


def main() -> None:
    url = postgres.create_database(os.environ["TEST_DATABASE_URL"])
    directory = tempfile.TemporaryDirectory(prefix="benchmark-")
    os.environ |= {"DATABASE_URL": url, "VAR_DIR": directory.name, "DJANGO_SETTINGS_MODULE": "config.settings"}
    os.environ["REDIS_URL"] = os.environ["TEST_REDIS_URL"]
    os.environ["DATABASE_ANSWER_SECONDS"] = "3600"  # the rows are made by one statement
    try:
        importlib.import_module("django").setup()
        metrics = measure()
    finally:
        from django.db import connections

        connections.close_all()
        postgres.drop_database(url)
        directory.cleanup()
    report("filters", metrics)


if __name__ == "__main__":
    main()
