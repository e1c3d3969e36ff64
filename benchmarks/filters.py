"""The time in the database of filtered lists of runs, on PostgreSQL: 1,000,000 runs of 1,000 users, and as many of one
user, for whom filters that are common alone and rare together are the worst case.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks filters``.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Metric, django_database, report

RUNS, CHATS, USERS, ROUNDS = int(os.environ.get("RUNS", "1000000")), 20_000, 1000, 5
# One run in 1,000 was cancelled. Of the others of the older half, every third failed. The 1,000 oldest have a model, an
# agent and a pair of their own. Every second of the others has an agent, in 500 versions. Every second run has
# metadata: a pair of half of them, and a pair of 10 of them. The runs with kind=good are a third of those with
# metadata, spread over all, and none of them failed or has kind=other.
CHATS_OF = """
    INSERT INTO chats_chat (id, user_id, has_line, created_at, updated_at)
    SELECT 'chat_' || %(kind)s || lpad(n::text, 20, '0'), (%(users)s::int[])[1 + n %% %(count)s], false, now(), now()
    FROM generate_series(0, %(chats)s - 1) n
"""
COLUMNS = {
    "id": "'run_' || %(kind)s || lpad(n::text, 20, '0')",
    "user_id": "(%(users)s::int[])[1 + n %% %(chats)s %% %(count)s]",
    "chat_id": "'chat_' || %(kind)s || lpad((n %% %(chats)s)::text, 20, '0')",
    "created_at": "original.created_at - (%(runs)s - n) * interval '1 second'",
    "status": """CASE WHEN n %% 1000 = 0 THEN 'cancelled' WHEN n %% 3 = 0 AND n < %(runs)s / 2 THEN 'failed'
        ELSE 'completed' END""",
    "resolved_model": "CASE WHEN n < 1000 THEN 'rare' WHEN n %% 5 = 0 THEN 'large' ELSE 'demo' END",
    "agent_name": "CASE WHEN n < 1000 THEN 'rare' WHEN n %% 2 = 0 THEN 'support' END",
    "agent": "CASE WHEN n < 1000 THEN 'rare@1' WHEN n %% 2 = 0 THEN 'support@' || 1 + n %% 1000 END",
}
PAIRS = """
    INSERT INTO runs_runmetadata (run_id, user_id, key, value, created_at)
    SELECT run.id, run.user_id, pair.key, pair.value, run.created_at
    FROM (SELECT *, substr(id, 6)::int n FROM runs_run WHERE id LIKE 'run_' || %(kind)s || '%%') run, LATERAL (VALUES
        ('env', CASE WHEN n %% 4 = 1 THEN 'prod' ELSE 'test' END), ('customer', (n / 20 %% 50000)::text),
        ('kind', CASE WHEN n %% 6 = 1 THEN 'good' ELSE 'other' END),
        ('place', CASE WHEN n %% 4 = 1 THEN 'a' ELSE 'b' END), ('old', CASE WHEN n < 1000 THEN 'yes' END)
    ) pair (key, value) WHERE n %% 2 = 1 AND pair.value IS NOT NULL
"""
FILTERS = [
    "",
    "status=failed",
    "status=failed,cancelled",
    "model=rare",
    "agent=support",
    "createdBefore={middle}",
    "metadata.env=prod",
    "metadata.customer=77",
    "metadata.old=yes",
    "metadata.env=prod&metadata.customer=77",
    "metadata.env=prod&status=failed,cancelled",
    "model=demo&status=failed",
    "agent=support&metadata.customer=77",
    "metadata.kind=good&status=failed",
    "metadata.env=prod&metadata.place=b",
    "model=rare&status=cancelled&metadata.env=prod",
]
MIDDLE = RUNS // 2


def fill(kind: str, users: list[Any]) -> None:
    from django.db import connection

    from runs.models import Run
    from tests.factories import RunFactory

    original = RunFactory(chat__user=users[0], finish_reason="stop")
    columns = [field.column for field in Run._meta.concrete_fields]
    values = ", ".join(COLUMNS.get(column, f"original.{column}") for column in columns)
    copies = f"""
        INSERT INTO runs_run ({", ".join(columns)}) SELECT {values}
        FROM runs_run original, generate_series(0, %(runs)s - 1) n WHERE original.id = %(original)s
    """
    sizes = {"kind": kind, "users": [user.pk for user in users], "count": len(users), "runs": RUNS, "chats": CHATS}
    with connection.cursor() as cursor:
        for statement in (CHATS_OF, copies, PAIRS, "VACUUM ANALYZE"):
            cursor.execute(statement, sizes | {"original": original.pk} if "%" in statement else None)


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
    from django.db import connection

    statements: list[tuple[str, Any]] = []

    def record(execute: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        statements.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(record):
        answer = client.get(f"/api/v1/runs?{query}")
    if answer.status_code != 200:
        raise RuntimeError(answer.content)
    return sum(in_database(*statement) for statement in statements if "runs_run" in statement[0])


def lists(kind: str, client: Any) -> list[Metric]:
    from config.api.pagination import encode_cursor
    from config.kernel.clock import iso
    from runs.models import Run

    middle = Run.objects.get(pk=f"run_{kind}{MIDDLE:020}")
    cursor = encode_cursor(middle.created_at, middle.pk)
    metrics = []
    for query in FILTERS:
        query = query.format(middle=iso(middle.created_at))
        first = page(client, query)
        deep = page(client, f"{query}&cursor={cursor}")
        target = "≤ 20 ms" if kind == "m" else ""
        name = f"{'many users' if kind == 'm' else 'one user'}: ?{query}"
        metrics.append(Metric(name, f"first page {first:.1f} ms, in the middle {deep:.1f} ms", target=target))
    return metrics


def measure() -> list[Metric]:
    from django.conf import settings
    from django.core.management import call_command

    from runs import filters
    from tests.factories import UserFactory, session_client

    settings.RATE_LIMIT_SESSION = 0
    settings.ALLOWED_HOSTS = ["testserver"]
    filters.SECONDS = 3600
    call_command("migrate", verbosity=0)
    found = []
    for kind, count in (("m", USERS), ("o", 1)):
        users = UserFactory.create_batch(count)
        fill(kind, users)
        found += lists(kind, session_client(users[0]))
    return found


def main() -> None:
    os.environ["DATABASE_ANSWER_SECONDS"] = "3600"  # the rows are made by one statement
    with django_database():
        metrics = measure()
    report("filters", metrics)


if __name__ == "__main__":
    main()
