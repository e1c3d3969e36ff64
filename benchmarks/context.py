"""Long chats, on PostgreSQL: what a worker takes to build the context of a run in a chat with 10,000 runs, and the
memory of a run worker while a chat outgrows its model's window.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks context``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Self

from benchmarks.harness import Metric, cpu_seconds, django_database, milliseconds, report, rss
from benchmarks.runs import Bench
from tests.stack.stack import Stack

RUNS, ROUNDS, BATCH = 10_000, 200, 1000
# With the result of its tool call, a run has about 2 KB.
WORDS, RESULT = "word " * 80, "result " * 170
NARROW = """
from runs.models import AgentModel, Provider
AgentModel.objects.create(
    name="narrow", display_name="Narrow", provider=Provider.objects.get(name="demo"), provider_model="demo",
    price_in=500_000, price_out=1_500_000, context_tokens=8000, max_output_tokens=1000,
)
"""
MEMORY_RUNS = (100, 500)


def fill(runs: int) -> Any:
    """A chat with so many runs with a tool call each, and a running run after them, which is returned. The part that
    the model no longer receives has been left out: 50 runs remain.
    """
    from config.kernel import clock
    from config.kernel.ids import new_id
    from runs.models import Compaction, Run, ToolInvocation, Turn
    from tests.factories import ChatFactory, MessageFactory, RunFactory, ToolInvocationFactory

    chat, now = ChatFactory(), clock.now()
    ids = [new_id("run") for _ in range(runs)]
    for first in range(0, runs, BATCH):
        rows: dict[Any, list[Any]] = {model: [] for model in (Run, type(MessageFactory.build()), Turn, ToolInvocation)}
        run_rows, messages, turns, calls = rows.values()
        for number, run_id in enumerate(ids[first : first + BATCH], first):
            own = MessageFactory.build(chat=chat, run_id=run_id, content=WORDS)
            answer = MessageFactory.build(chat=chat, run_id=run_id, content=WORDS, role="assistant")
            at = now - timedelta(seconds=runs - number)
            run = RunFactory.build(id=run_id, chat=chat, user_message_id=own.pk, created_at=at, turn_count=2)
            call = ToolInvocationFactory.build(run=run, call_index=1, result=RESULT)
            asked = [{"id": call.tool_call_id, "name": call.name, "arguments": "{}"}]
            run_rows.append(run)
            messages += [own, answer]
            turns.append(Turn(run=run, index=1, model="demo", tool_calls=asked, started_at=at, finished_at=at))
            turns.append(Turn(run=run, index=2, model="demo", text=WORDS, started_at=at, finished_at=at))
            calls.append(call)
        for model, batch in rows.items():
            model.objects.bulk_create(batch)
    last = RunFactory(chat=chat, status="running", created_at=now)
    message = MessageFactory(chat=chat, run_id=last.pk)
    Run.objects.filter(pk=last.pk).update(user_message_id=message.pk)
    last.refresh_from_db()
    if runs > 50:
        Compaction.objects.create(
            chat=chat, run_id=ids[-50], index=1, turn_index=1, kind="summary", last_run_id=ids[-51], text=WORDS,
            tokens_before=0, tokens_after=0, started_at=now, finished_at=now,
        )  # fmt: skip
    return last


class Builder:
    """Does what a worker does from the claim of a run to its first request. Use it as a context manager."""

    def __init__(self) -> None:
        from runs.catalogue import find_models
        from runs.engine.session import Process

        self.model, self.process = find_models("demo", None)[0], Process()
        self.runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.close()

    def __call__(self, run: Any) -> int:
        """Returns the number of messages."""
        from runs.engine import history
        from runs.engine.journal import Journal
        from runs.engine.session import Claimed, Session

        loaded = history.load(run, self.model.context_tokens)
        return self.runner.run(self.request(Session(self.process, Claimed(run, loaded, Journal()))))

    async def request(self, session: Any) -> int:
        from runs.engine import compaction, context

        plan = await compaction.fit(session, self.model)
        assert plan is not None
        return len(context.request(session, plan).messages)


def took(work: Callable[[], Any], pids: list[int]) -> str:
    """The durations of ROUNDS calls, and the CPU of the processes for a call."""
    times: list[float] = []
    for number in range(ROUNDS + 10):
        if number == 10:  # the first rounds plan statements and fill caches
            cpu = cpu_seconds(pids)
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    each = (cpu_seconds(pids) - cpu) * 1000 / ROUNDS
    return f"{milliseconds(times[10:])}, CPU of worker and database {each:.1f} ms"


def long_chat() -> Metric:
    from django.core.management import call_command
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    call_command("migrate", verbosity=0)
    runs = {"long": fill(RUNS), "short": fill(1)}
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
        cursor.execute("SELECT pg_backend_pid()")
        pids = [os.getpid(), cursor.fetchone()[0]]
    # The process has the objects of ``fill``, which a worker does not have.
    gc.collect()
    gc.freeze()
    queries, sent, times = {}, {}, {}
    for name, run in runs.items():
        with Builder() as build:
            sent[name] = build(run)
            with CaptureQueriesContext(connection) as captured:
                build(run)
            queries[name] = len(captured)
            times[name] = took(partial(build, run), pids)
    return Metric(
        f"context of a run after {RUNS} runs: {sent['long']} messages, {queries['long']} queries",
        times["long"],
        f"{times['short']} after one run, {queries['short']} queries",
        target="p99 ≤ 20 ms",
    )


def memory() -> Metric:
    """The memory of a run worker, which executes the runs of one chat that outgrows its model's window many times."""
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    settings = {"SIGNUP_CREDITS": "1000000", "TOOL_CALLS_PER_USER": "32"}
    found = {}
    with Stack(**services, run_workers=1, environment=settings, prepare=NARROW) as stack:
        bench = Bench(stack)
        http, chat = bench.connection(), bench.chats(1)[0]
        for number in range(1, max(MEMORY_RUNS) + 1):
            message = f'/call calculate {{"expression": "{number}*1000003"}}\n/say {WORDS}\n' + "padding " * 190
            run = http.json("POST", f"/api/v1/chats/{chat}/runs", {"message": message, "model": "narrow"})
            while run["status"] not in ("completed", "failed"):
                time.sleep(0.01)
                run = http.json("GET", f"/api/v1/runs/{run['id']}")
            assert run["status"] == "completed", run
            if number in MEMORY_RUNS:
                found[number] = rss(bench.pid("runs-1")) / 2**20
        compactions = bench.one("SELECT count(*) FROM runs_compaction")
    before, after = found.values()
    return Metric(
        f"memory of a run worker after {MEMORY_RUNS[1]} runs of 2 KB in one chat, window of 8,000 tokens, "
        f"{compactions} compactions, all runs completed",
        f"{after:.1f} MiB",
        f"{before:.1f} MiB after {MEMORY_RUNS[0]} runs",
        after / before,
        "≤ 1.05",
    )


def main() -> None:
    with django_database():
        metric = long_chat()
    report("long chats", [metric, memory()])


if __name__ == "__main__":
    main()
