"""What is measured of runs, tool calls and streams: counted where it happens, after its commit; and read when asked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from django.db import connection, transaction

from config.kernel import clock
from config.telemetry.metrics import Counter, Gauge, Histogram, PerProcess
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    FINAL_RUN_STATUSES,
    InvocationStatus,
    Run,
    RunStatus,
    ToolInvocation,
    Worker,
)

finished = Counter("runs_finished", "Runs that ended, by final status and errorCode.", ["status", "error"])
running_seconds = Histogram("run_seconds", "Running time of runs that ended, without their waiting.", ["status"])
start_seconds = Histogram("run_start_seconds", "From queued to running.")
leases_lost = Counter("run_leases_lost", "Runs whose worker was lost.")
tool_calls = Counter(
    "tool_calls", "Tool calls that ended, by outcome: COMPLETED, or the errorCode.", ["tool", "outcome"]
)
tool_seconds = Histogram("tool_seconds", "From a tool call's dispatch to its result.", ["tool"])
streams_open = PerProcess("streams_open", "Streams of runs that clients hold open.")


def run_moved(run: Run, to: str, changes: dict[str, Any]) -> None:
    """Count a transition once it is committed; ``run`` is still as it was before."""
    if to == RunStatus.RUNNING:
        delay = (clock.now() - run.updated_at).total_seconds()
        transaction.on_commit(partial(start_seconds.observe, max(0.0, delay)), robust=True)
    elif to in FINAL_RUN_STATUSES:
        ran = changes.get("ran_ms", run.ran_ms) / 1000
        transaction.on_commit(partial(_count_end, to, changes.get("error_code") or "", ran), robust=True)


def _count_end(status: str, error: str, seconds: float) -> None:
    finished.inc(status, error)
    running_seconds.observe(seconds, status)


def call_moved(call: ToolInvocation, before: str) -> None:
    """The same of a tool call, which is already as it is now. Its name is one of the catalogue's."""
    if call.status in FINAL_INVOCATION_STATUSES:
        transaction.on_commit(partial(_count_call, call, before == InvocationStatus.DISPATCHING), robust=True)


def _count_call(call: ToolInvocation, was_made: bool) -> None:
    tool_calls.inc(call.name, call.error_code or call.status)
    if was_made and call.started_at and call.finished_at:
        tool_seconds.observe(max(0.0, (call.finished_at - call.started_at).total_seconds()), call.name)


def losses(count: int) -> None:
    if count:
        transaction.on_commit(partial(leases_lost.inc, by=count), robust=True)


# Each from a partial index that holds live runs only, so a million finished ones cost nothing. The conditions are those
# indexes' own, for they are used only then.
_ACTIVE = """
    SELECT status, throttled, count(*), min(updated_at) FROM runs_run
    WHERE NOT blocked AND status IN ('queued', 'running', 'waiting') GROUP BY status, throttled
"""
_IN_LINE = "SELECT count(*) FROM runs_run WHERE blocked"


def gauges() -> Iterator[Gauge]:
    """Live runs by state, the longest wait of one that could execute, and live workers."""
    counts = {(state,): 0.0 for state in ("queued", "in_line", "throttled", "running", "waiting")}
    oldest = 0.0
    with connection.cursor() as cursor:
        cursor.execute(_ACTIVE)
        for status, throttled, count, since in cursor.fetchall():
            counts[("throttled" if throttled else status,)] += count
            if status == RunStatus.QUEUED and not throttled:
                oldest = max(0.0, (clock.now() - _moment(since)).total_seconds())
        cursor.execute(_IN_LINE)
        counts[("in_line",)] = float(cursor.fetchone()[0])
    help = "Live runs. Of the queued, in_line waits for its chat's earlier runs, throttled for its user's others."
    yield Gauge("runs", help, counts, ["state"])
    yield Gauge("runs_oldest_queued_seconds", "How long the oldest run that could execute has waited.", {(): oldest})
    workers = Worker.objects.filter(expires_at__gte=clock.now()).count()
    yield Gauge("run_workers", "Run worker processes whose lease holds.", {(): float(workers)})


def _moment(value: Any) -> Any:
    """SQLite gives text in raw SQL."""
    convert = connection.ops.get_db_converters(Run._meta.get_field("updated_at").get_col("runs_run"))
    for step in convert:
        value = step(value, None, connection)
    return value
