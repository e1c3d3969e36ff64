"""Tool calls whose outcome comes without a worker: from the tool's own callback, or from the caller's app.

Such a call stays DISPATCHING and has ``awaiting``. A run all of whose open calls await others is parked: it stays
running, without a worker and without a place of RUN_USER_LIMIT, until the last of them has ended. An outcome needs no
lease: its transaction locks the run, and an owner that is at work finds its run's stream ahead and reads it again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import F

from config.kernel import clock
from config.queue.nudges import nudge_after_commit
from credits import ledger
from runs import events
from runs.errors import CallError
from runs.lifecycle import calls
from runs.lifecycle.calls import NOT_AWAITING
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.line import EXECUTE, NUDGE_GRACE, lock_user, nudge_next_throttled
from runs.lifecycle.moves import Moved, changed, fence, lock_run, move_call, move_run, stop_running
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    Awaiting,
    InvocationStatus,
    Run,
    RunStatus,
    ToolInvocation,
)
from runs.tools.base import PROGRESS_MAX_CHARS, Parked, StillParked, ToolFailure, ToolResult, clean_text, shorten

# Of a call's progress, one of this many seconds is kept.
PROGRESS_SECONDS = 1
# When a tool's server is told of the end of a call, counted from that end.
TOLD_AFTER_SECONDS = (0, 30, 90)
# A request about a call that is open may take so long; then another worker makes it again.
CONTACT_SECONDS = 60


class Recorded(NamedTuple):
    """The call as it then is, and whether what was sent counts."""

    call: ToolInvocation
    accepted: bool


@transaction.atomic
def park_call(run: Run, call: ToolInvocation, parked: Parked) -> Moved:
    """DISPATCHING, and from now on it awaits its tool; or → FAILED if the user has PARKED_CALLS_PER_USER such calls."""
    lock_user(run.pk)  # so that calls of other runs are counted
    fence(run)
    if not calls.may_park(run):
        return calls.record_call_failure(run, call, CallError.TOOL_ERROR, calls.TOO_MANY_PARKED)
    now = clock.now()
    expires_at = latest_end(call)
    if parked.expires_in_seconds is not None:
        expires_at = min(expires_at, now + timedelta(seconds=parked.expires_in_seconds))
    changes: dict[str, Any] = {"awaiting": Awaiting.TOOL.value, "expires_at": expires_at}
    if parked.message:
        changes["progress"] = _progress(now, None, parked.message)
    if parked.contact_in_seconds is not None:
        contact_at = now + timedelta(seconds=parked.contact_in_seconds)
        changes |= {"contact_at": contact_at, "remote_task": parked.remote_task}
    call = move_call(call, InvocationStatus.DISPATCHING, **changes)
    happened = [events.tool_parked(call)] + ([events.tool_progress(call)] if parked.message else [])
    run = move_run(run, RunStatus.RUNNING, happened, owned=True, awaiting=run.awaiting or Awaiting.TOOL.value)
    crash_after_commit("call_parked")
    return Moved(run, [call])


def latest_end(call: ToolInvocation) -> datetime:
    """Until when a dispatched call may await its tool: the same at each attempt."""
    assert call.started_at is not None  # noqa: S101  (it is dispatched)
    return call.started_at + timedelta(seconds=call.park_seconds or 0)


@transaction.atomic
def park_run(run: Run) -> Moved:
    """The owner gives up its lease and the run's place, because all open calls await others."""
    changes = stop_running(run) | {"parked": True, "due_at": None}
    run = move_run(run, RunStatus.RUNNING, (), owned=True, **changes)
    nudge_next_throttled(run.user_id)
    crash_after_commit("run_parked")
    return Moved(run)


@transaction.atomic
def record_outcome(call_id: str, outcome: ToolResult | ToolFailure) -> Recorded:
    """DISPATCHING → COMPLETED or FAILED, in any state of the run, without its lease. Of any number of outcomes the
    first counts, and none after the call's time.
    """
    run = _lock_run_of(call_id)
    call = ToolInvocation.objects.get(pk=call_id)
    if call.status != InvocationStatus.DISPATCHING:
        return Recorded(call, accepted=False)
    if call.expires_at is not None and call.expires_at <= clock.now():
        return Recorded(_expire(run, call), accepted=False)
    return Recorded(_end(run, call, outcome), accepted=True)


@transaction.atomic
def record_progress(call_id: str, fraction: float | None, message: str | None) -> Recorded:
    """The progress of an open call, unless the last one is less than PROGRESS_SECONDS old."""
    run = _lock_run_of(call_id)
    call = ToolInvocation.objects.get(pk=call_id)
    now = clock.now()
    if call.status != InvocationStatus.DISPATCHING or _is_recent(call, now):
        return Recorded(call, accepted=False)
    call = move_call(call, InvocationStatus.DISPATCHING, progress=_progress(now, fraction, message))
    move_run(run, run.status, [events.tool_progress(call)], owned=False)
    return Recorded(call, accepted=True)


def _is_recent(call: ToolInvocation, now: datetime) -> bool:
    last = (call.progress or {}).get("at")
    return last is not None and now - datetime.fromisoformat(last) < timedelta(seconds=PROGRESS_SECONDS)


def _progress(now: datetime, fraction: float | None, message: str | None) -> dict[str, Any]:
    text = shorten(clean_text(message), PROGRESS_MAX_CHARS) if message else None
    return {"fraction": fraction, "message": text, "at": clock.iso(now)}


@transaction.atomic
def expire_call(call_id: str) -> bool:
    """A call that awaits its outcome after its time → FAILED; the run goes on. False if there was nothing to do, or if
    the run is locked.
    """
    run = lock_run(_run_of(call_id), wait=False)
    call = ToolInvocation.objects.filter(pk=call_id, awaiting__isnull=False, expires_at__lte=clock.now()).first()
    if run is None or call is None:
        return False
    _expire(run, call)
    return True


def _expire(run: Run, call: ToolInvocation) -> ToolInvocation:
    who = "The app" if call.awaiting == Awaiting.CLIENT else call.name
    failure = ToolFailure(CallError.TOOL_TIMEOUT, f"{who} gave no outcome in time.")
    return _end(run, call, failure, **calls.to_tell(call, "expired"))


def _end(run: Run, call: ToolInvocation, outcome: ToolResult | ToolFailure, **told: Any) -> ToolInvocation:
    changes: dict[str, Any] = {"finished_at": clock.now()} | NOT_AWAITING | told
    if isinstance(outcome, ToolFailure):
        to = InvocationStatus.FAILED
        changes |= {"error_code": outcome.code, "error_message": outcome.message}
    else:
        to = InvocationStatus.COMPLETED
        changes |= calls.result_columns(call, outcome.text, outcome.urls, outcome.credit_used)
    ended = move_call(call, to, **changes)
    left = ToolInvocation.objects.filter(run=run).exclude(status__in=FINAL_INVOCATION_STATUSES)
    kinds = set(left.values_list("awaiting", flat=True))
    after: dict[str, Any] = {"awaiting": next((kind.value for kind in calls.FIRST if kind in kinds), None)}
    if resumes := run.parked and not kinds:
        after["due_at"] = clock.now() + NUDGE_GRACE
    move_run(run, run.status, [events.tool_completed(ended)], owned=False, **after)
    if to == InvocationStatus.COMPLETED:
        ledger.capture(call.id, ended.credit_used)
    else:
        ledger.release(call.id)
    crash_after_commit("outcome")
    if resumes:
        nudge_after_commit(EXECUTE, run.pk)
    return ended


def _lock_run_of(call_id: str) -> Run:
    run = lock_run(_run_of(call_id))
    assert run is not None  # noqa: S101  (a call's row is deleted with its run's)
    return run


def _run_of(call_id: str) -> str:
    return ToolInvocation.objects.values_list("run_id", flat=True).get(pk=call_id)


# --- requests about parked calls to their tools' servers --------------------------------------------------------------


@transaction.atomic
def take_contact(call_id: str) -> ToolInvocation | None:
    """A call whose tool's server is due to be contacted. It is due again in case this process dies: of an open call
    after CONTACT_SECONDS; of one that has ended at the next of TOLD_AFTER_SECONDS, if there is one. None if it is not
    due.
    """
    now = clock.now()
    due = ToolInvocation.objects.filter(pk=call_id, contact_at__lte=now).select_for_update(no_key=True)
    call = due.select_related("run__user").first()
    if call is None:
        return None
    again: datetime | None = now + timedelta(seconds=CONTACT_SECONDS)
    if call.status in FINAL_INVOCATION_STATUSES:
        assert call.finished_at is not None  # noqa: S101
        later = TOLD_AFTER_SECONDS[call.contacts + 1 : call.contacts + 2]
        again = call.finished_at + timedelta(seconds=later[0]) if later else None
    ToolInvocation.objects.filter(pk=call_id).update(contact_at=again, contacts=F("contacts") + 1)
    return changed(call, contact_at=again, contacts=call.contacts + 1)


def end_contact(call_id: str) -> None:
    """The tool's server knows what it has to know."""
    ToolInvocation.objects.filter(pk=call_id).update(contact_at=None)


def contact_again(call_id: str, still: StillParked) -> None:
    """An open call has no outcome yet."""
    at = clock.now() + timedelta(seconds=still.contact_in_seconds)
    changes: dict[str, Any] = {"contact_at": at}
    if still.remote_task is not None:
        changes["remote_task"] = still.remote_task
    ToolInvocation.objects.filter(pk=call_id, status=InvocationStatus.DISPATCHING).update(**changes)
    if still.fraction is not None or still.message:
        record_progress(call_id, still.fraction, still.message)


def due_contacts(limit: int) -> list[str]:
    """Calls whose tools' servers are due to be contacted, longest due first."""
    due = ToolInvocation.objects.filter(contact_at__lte=clock.now()).order_by("contact_at")
    return list(due.values_list("pk", flat=True)[:limit])
