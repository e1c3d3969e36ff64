"""The dashboard's health strip, and how long runs take: is the service at work, and if not, what to do about it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from config.api import metrics_page
from config.kernel import clock
from config.kernel.ids import first_id
from config.queue.jobs import last_success
from config.staff.base import page_of
from config.telemetry.metrics import SEPARATOR
from runs.admin.timeline import span
from runs.errors import FailureReason, RunError
from runs.models import Run, RunStatus

RUNBOOK = "/docs/operations#"
# As in the alerts of docs/prometheus.
QUEUED_SECONDS_MAX = 60
# Beat starts a job every few seconds; after this time without one, something is wrong.
BEAT_SECONDS_MAX = 300
# The latest runs of a day whose times are read.
RUNS_TIMED, HOURS = 1000, 24


def health() -> list[dict[str, str]]:
    """Each part: its state, a tone, and the runbook if it is not well. ``link`` leads to the run that it is about."""
    found = metrics_page.reading()
    values = {gauge.name: gauge.values.get((), 0.0) for gauge in found.gauges}
    workers, waited = int(values.get("run_workers", 0)), values.get("runs_oldest_queued_seconds", 0.0)
    redis = found.up["redis"]
    return [
        part("Workers", str(workers), workers > 0, "norunworkers"),
        _beat(found.latest) if redis else part("Beat", "not known without Redis", None, "sourcedown"),
        part("Redis", "answers" if redis else "does not answer", redis, "sourcedown"),
        _oldest(waited),
        _last_error(),
    ]


def part(label: str, value: str, well: bool | None, runbook: str, link: str = "") -> dict[str, str]:
    tone = {True: "success", False: "danger", None: "default"}[well]
    return {
        "label": label,
        "value": value,
        "tone": tone,
        "runbook": "" if well else f"{RUNBOOK}{runbook}",
        "link": link,
    }


def _beat(latest: dict[str, str]) -> dict[str, str]:
    """By the job that succeeded last: beat starts them all."""
    ended = [float(value) for key, value in latest.items() if key.split(SEPARATOR)[0] == last_success.name]
    if not ended:
        return part("Beat", "no job has ended yet", None, "housekeepingstale")
    since = clock.now() - datetime.fromtimestamp(max(ended), UTC)
    well = since.total_seconds() < BEAT_SECONDS_MAX
    return part("Beat", "works" if well else f"silent for {span(since)}", well, "housekeepingstale")


def _oldest(waited: float) -> dict[str, str]:
    """The run that could execute and has waited longest; runs behind others of their chat or user do not count."""
    runnable = Run.objects.filter(status=RunStatus.QUEUED, blocked=False, throttled=False)
    # The index of due runs; its condition is on the first two.
    run = runnable.order_by("due_at").values_list("pk", flat=True).first() if waited else None
    text = f"waits {span(timedelta(seconds=waited))}" if waited else "none waits"
    return part(
        "Oldest queued run", text, waited <= QUEUED_SECONDS_MAX, "runsnottaken", page_of(Run, run) if run else ""
    )


def _last_error() -> dict[str, str]:
    failed = Run.objects.filter(status=RunStatus.FAILED).order_by("-pk")
    run = failed.only("error_code", "failure_reason", "finished_at").first()
    if run is None:
        return part("Last error", "none", True, "")
    since = span(clock.now() - run.finished_at) if run.finished_at else ""
    return part(
        "Last error", f"{run.failure_reason or run.error_code}, {since} ago", None, "runsfail", page_of(Run, run.pk)
    )


def why(run: Run) -> str:
    """The reason of a failure, in a sentence for staff."""
    cause = next((reason for reason in FailureReason if reason == run.failure_reason), None)
    code = next((code for code in RunError if code == run.error_code), None)
    known = cause or code
    return known.sentence if known else ""


def times() -> dict[str, Any]:
    """The start delay, and with the running time the latency, of the latest runs of the last HOURS: half and 95 % are
    faster. A run's waits for its user do not count.
    """
    begin = clock.now() - timedelta(hours=HOURS)
    rows = Run.objects.filter(pk__gte=first_id("run", begin)).order_by("-pk")
    found = list(rows.values_list("created_at", "started_at", "finished_at", "ran_ms")[:RUNS_TIMED])
    delays = sorted(started - created for created, started, _, _ in found if started)
    whole = sorted(
        started - created + timedelta(milliseconds=ran) for created, started, ended, ran in found if started and ended
    )
    facts = [
        (f"{label} p{share}", span(percentile(durations, share)) if durations else "–")
        for label, durations in (("Start delay", delays), ("Latency", whole))
        for share in (50, 95)
    ]
    return {"facts": facts, "count": len(whole)}


def percentile(ordered: list[timedelta], share: int) -> timedelta:
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]
