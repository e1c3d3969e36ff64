"""Metrics of runs, tool calls and streams: counters, which grow after commits, and gauges, which queries read."""

from collections.abc import Iterator
from functools import partial

from django.db import transaction
from django.db.models import Count, Min

from config.kernel import clock
from config.telemetry.metrics import Counter, Gauge, Histogram, PerProcess
from runs.models import InvocationStatus, Run, RunStatus, ToolInvocation, Worker

finished = Counter(
    "runs_finished",
    "Runs that ended, by final status, errorCode, and the model's failure if that is the cause.",
    ["status", "error", "reason"],
)
running_seconds = Histogram("run_seconds", "Running time of runs that ended, without their waiting.", ["status"])
start_seconds = Histogram("run_start_seconds", "From queued to running.")
leases_lost = Counter("run_leases_lost", "Runs whose worker was lost.")
tool_calls = Counter(
    "tool_calls", "Tool calls that ended, by outcome: COMPLETED, or the errorCode.", ["tool", "outcome"]
)
tool_seconds = Histogram("tool_seconds", "From a tool call's dispatch to its result.", ["tool"])
tool_calls_open = PerProcess(
    "tool_calls_open", "Tool calls that are at work, and that wait for a place of their user.", ["state"]
)
model_requests_open = PerProcess(
    "model_requests_open",
    "Requests to models that are at work, and that wait for a place at their provider.",
    ["provider", "state"],
)
streams_open = PerProcess("streams_open", "Streams of runs that clients hold open.")


def run_moved(before: Run, run: Run) -> None:
    """Count a transition after its commit."""
    if run.status == RunStatus.RUNNING:
        delay = (clock.now() - before.updated_at).total_seconds()
        transaction.on_commit(partial(start_seconds.observe, max(0.0, delay)), robust=True)
    elif run.is_over:
        ended = finished.labels(run.status, run.error_code or "", run.failure_reason or "")
        transaction.on_commit(ended.inc, robust=True)
        transaction.on_commit(partial(running_seconds.labels(run.status).observe, run.ran_ms / 1000), robust=True)


def call_moved(call: ToolInvocation, before: str) -> None:
    """Count the end of a tool call after the commit. ``call`` has the new state, ``before`` is the old status."""
    if call.is_open:
        return
    transaction.on_commit(tool_calls.labels(call.name, call.error_code or call.status).inc, robust=True)
    if before == InvocationStatus.DISPATCHING and call.started_at and call.finished_at:
        seconds = max(0.0, (call.finished_at - call.started_at).total_seconds())
        transaction.on_commit(partial(tool_seconds.labels(call.name).observe, seconds), robust=True)


def gauges() -> Iterator[Gauge]:
    """Live runs by state, the longest wait of a run that can execute, and live workers, all counted by indexes."""
    # A queued run that is neither blocked nor throttled could execute, and has a ``due_at``.
    due = Run.objects.filter(status=RunStatus.QUEUED, blocked=False, throttled=False, due_at__isnull=False)
    could_execute = due.aggregate(count=Count("pk"), since=Min("updated_at"))
    since = could_execute["since"]
    oldest = max(0.0, (clock.now() - since).total_seconds()) if since else 0.0
    parked = Run.objects.filter(parked=True).count()
    # The calls of these have ended; they wait for a place.
    parked_throttled = Run.objects.filter(parked=True, throttled=True).count()
    live = {
        RunStatus.QUEUED.value: could_execute["count"],
        RunStatus.RUNNING.value: max(0, Run.objects.filter(status=RunStatus.RUNNING).count() - parked),
        "parked": max(0, parked - parked_throttled),
        RunStatus.WAITING.value: Run.objects.filter(status=RunStatus.WAITING).count(),
        "in_line": Run.objects.filter(blocked=True).count(),
        "throttled": Run.objects.filter(throttled=True).count(),
    }
    help = (
        "Live runs. in_line waits for earlier runs of its chat, throttled for other runs of its user. "
        "A parked run awaits the outcome of tool calls, without a worker."
    )
    yield Gauge("runs", help, {(state,): float(count) for state, count in live.items()}, ["state"])
    yield Gauge("runs_oldest_queued_seconds", "How long the oldest run that could execute has waited.", {(): oldest})
    workers = Worker.objects.filter(expires_at__gte=clock.now()).count()
    yield Gauge("run_workers", "Run worker processes whose lease holds.", {(): float(workers)})
