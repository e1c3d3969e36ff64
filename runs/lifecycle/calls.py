"""Every transition of a tool call; ``moves`` has the rules."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from config.kernel import clock
from config.queue.nudges import nudge_after_commit
from credits import ledger
from runs import events, metrics
from runs.errors import CallError
from runs.events import StreamEvent
from runs.lifecycle import spending
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.line import lock_user
from runs.lifecycle.moves import Moved, changed, close_waitpoint, fence, move_call, move_run
from runs.lifecycle.spending import Refusal
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    Awaiting,
    InvocationStatus,
    Run,
    RunStatus,
    ToolInvocation,
    Waitpoint,
    WaitpointStatus,
)
from runs.tools.base import CLIENT
from runs.tools.questions import Dialogue

# In place of a refusal.
WAITS = Refusal("", 0, 0)

# The task that contacts the servers of parked calls' tools.
CONTACT = "runs.contact_tools"
# What a call that has ended no longer has.
NOT_AWAITING: dict[str, Any] = {
    "awaiting": None,
    "expires_at": None,
    "progress": None,
    "contact_at": None,
    "remote_task": "",
}
# What a run shows if its open calls await both.
FIRST = (Awaiting.CLIENT, Awaiting.TOOL)
TOO_MANY_PARKED = "Too many calls of the user await their outcome."


def reject_new_call(call: ToolInvocation, code: str, message: str) -> ToolInvocation:
    """(new) → FAILED: a call that cannot be made. It is not stored yet."""
    now = clock.now()
    return changed(
        call, status=InvocationStatus.FAILED, error_code=code, error_message=message, started_at=now, finished_at=now
    )


def dispatch_new_calls(run: Run, calls: Sequence[ToolInvocation]) -> list[ToolInvocation]:
    """(new) → DISPATCHING with the hold placed, or → FAILED if credits or budget do not suffice; as it is if it or its
    run has to wait for credits. The calls are not stored yet; the same transaction has fenced the run and stores them.
    """
    made: list[ToolInvocation] = []
    for call, to, changes in _dispatched(run, calls):
        made.append(changed(call, status=to, **changes))
        if to != call.status:
            metrics.call_moved(made[-1], call.status)
    return made


@transaction.atomic
def dispatch_calls(run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()) -> Moved:
    """PENDING → DISPATCHING with the hold placed, or → FAILED if credits or budget do not suffice; as it is if it has
    to wait for credits, or its run has.

    ``approved`` calls usually have their holds since the approval.
    """
    # The fence locks the run, so that its calls are compared with its budget one after another.
    fence_to_dispatch(run, calls)
    moved: list[ToolInvocation] = []
    for call, to, changes in _dispatched(run, calls, approved):
        moved.append(move_call(call, to, **changes) if to != call.status else call)
    run = move_run(run, RunStatus.RUNNING, dispatch_events(moved), owned=True, **awaited(run, moved))
    return Moved(run, moved)


def fence_to_dispatch(run: Run, calls: Iterable[ToolInvocation]) -> None:
    """``fence``, and calls for the caller's app are counted with those of the user's other runs."""
    if any(call.node_type == CLIENT for call in calls):
        lock_user(run.pk)
    fence(run)


def awaited(run: Run, calls: Iterable[ToolInvocation]) -> dict[str, Any]:
    """What calls that have begun to await an outcome change in their run's row."""
    kinds = {run.awaiting, *(call.awaiting for call in calls)}
    return {"awaiting": next((kind.value for kind in FIRST if kind in kinds), None)}


def room_to_park(user_id: int) -> int:
    """How many calls of the user may still begin to await their outcome (PARKED_CALLS_PER_USER)."""
    calls = ToolInvocation.objects.filter(run__user_id=user_id, run__awaiting__isnull=False, awaiting__isnull=False)
    return settings.PARKED_CALLS_PER_USER - calls.count()


def _dispatched(
    run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()
) -> Iterator[tuple[ToolInvocation, str, dict[str, Any]]]:
    """The status that each call reaches, and its other changes. No tool begins work that could not be awaited."""
    awaits = {call.id for call in calls if call.node_type == CLIENT or call.park_seconds is not None}
    room = room_to_park(run.user_id) if awaits else 0
    for call in calls:
        is_held = call.id in approved and ledger.is_held(call.id)
        if call.id in awaits and room <= 0:
            if is_held:
                ledger.release(call.id)
            failure = {"error_code": CallError.TOOL_ERROR.value, "error_message": TOO_MANY_PARKED}
            yield call, InvocationStatus.FAILED, failure | {"finished_at": clock.now()}
            continue
        to, changes = _dispatch(run, call, is_held)
        room -= to == InvocationStatus.DISPATCHING and call.id in awaits
        yield call, to, changes


def _dispatch(run: Run, call: ToolInvocation, is_held: bool) -> tuple[str, dict[str, Any]]:
    """A call for the caller's app awaits it at once."""
    if call.node_type == CLIENT:
        now = clock.now()
        expires_at = now + timedelta(seconds=settings.CLIENT_CALL_SECONDS)
        return InvocationStatus.DISPATCHING, {
            "started_at": now,
            "awaiting": Awaiting.CLIENT.value,
            "expires_at": expires_at,
        }
    refusal = None if is_held else place_hold(run, call)
    if refusal is None:
        return InvocationStatus.DISPATCHING, {"started_at": clock.now()}
    if refusal is WAITS or run.waits_for_credits:
        return InvocationStatus.PENDING, {}
    failure = {"error_code": refusal.code, "error_message": refusal.message}
    return InvocationStatus.FAILED, failure | {"finished_at": clock.now()}


def dispatch_events(calls: Iterable[ToolInvocation]) -> list[StreamEvent]:
    """The events of calls that were dispatched, or that failed instead."""
    happened: list[StreamEvent] = []
    for call in calls:
        if call.status == InvocationStatus.DISPATCHING:
            happened.append(events.tool_started(call))
            if call.awaiting:
                happened.append(events.tool_parked(call))
        elif call.status != InvocationStatus.PENDING:
            happened.append(events.tool_completed(call))
    return happened


def place_hold(run: Run, call: ToolInvocation) -> Refusal | None:
    """Hold the call's estimate. Returns None, or why it cannot be held; WAITS if other steps hold the credits."""
    if over := spending.budget_refusal(run, call.credit_estimate):
        return over
    try:
        ledger.hold(
            run.user_id,
            call.credit_estimate,
            invocation_id=call.id,
            tool_key=call.name,
            chat_id=run.chat_id,
            run_id=run.id,
            price={"perCall": call.credit_estimate},
            only_if=spending.first_in_line(run),
        )
    except ledger.InsufficientCredits:
        return spending.refusal(run, call.credit_estimate) or WAITS
    return None


@transaction.atomic
def record_call_result(
    run: Run, call: ToolInvocation, *, text: str = "", urls: Iterable[str] = (), credit_used: int | None = None
) -> Moved:
    """DISPATCHING → COMPLETED: the result is recorded, its cost captured, the rest of the hold released."""
    columns = result_columns(call, text, urls, credit_used)
    moved = _record_end(run, call, InvocationStatus.COMPLETED, **columns)
    ledger.capture(call.id, columns["credit_used"])
    return moved


def result_columns(call: ToolInvocation, text: str, urls: Iterable[str], credit_used: int | None) -> dict[str, Any]:
    """The columns of a result. The call costs its estimate at most."""
    used = min(call.credit_estimate if credit_used is None else credit_used, call.credit_estimate)
    return {"result": text, "result_urls": list(urls), "credit_used": used}


@transaction.atomic
def record_call_failure(run: Run, call: ToolInvocation, code: str, message: str, **changes: Any) -> Moved:
    """DISPATCHING (or PENDING) → FAILED: the model receives the error, and the hold is released."""
    moved = _record_end(run, call, InvocationStatus.FAILED, error_code=code, error_message=message, **changes)
    ledger.release(call.id)
    return moved


def _record_end(run: Run, call: ToolInvocation, to: str, **changes: Any) -> Moved:
    changes["finished_at"] = clock.now()
    if call.remote_task:
        changes["remote_task"] = ""
    ended = changed(call, status=to, **changes)
    run = move_run(run, RunStatus.RUNNING, [events.tool_completed(ended)], owned=True)
    return Moved(run, [move_call(call, to, **changes)])


@transaction.atomic
def record_asked(run: Run, call: ToolInvocation, remote_task: str) -> Moved:
    """The server of a call that it has not finished asks the user: the call is made again with the answers."""
    run = move_run(run, RunStatus.RUNNING, (), owned=True)
    call = move_call(call, InvocationStatus.DISPATCHING, remote_task=remote_task)
    crash_after_commit("call_asked")
    return Moved(run, [call])


@transaction.atomic
def call_again(run: Run, call: ToolInvocation) -> Moved:
    """Before the answers are sent: if this worker is lost then, the outcome is as unknown as that of any call."""
    run = move_run(run, RunStatus.RUNNING, (), owned=True)
    remote_task = Dialogue.from_text(call.remote_task).when_begun().to_text()
    return Moved(run, [move_call(call, InvocationStatus.DISPATCHING, remote_task=remote_task)])


def take_answer(call: ToolInvocation, data: dict[str, Any] | None) -> None:
    """The user's answer to what the server of an open call asks; None declines it. A task's server is told at once when
    it has all answers, that of any other call when it is made again.
    """
    dialogue = Dialogue.from_text(call.remote_task).with_answer(data)
    changes: dict[str, Any] = {"remote_task": dialogue.to_text()}
    if call.awaiting and not dialogue.questions:
        changes["contact_at"] = clock.now()
        nudge_after_commit(CONTACT, call.id)
    move_call(call, InvocationStatus.DISPATCHING, **changes)


def approve_call(run: Run, call: ToolInvocation) -> ToolInvocation:
    """The hold of an approved call is placed and the call stays PENDING, also if the hold or the run has to wait for
    credits; or → FAILED if credits or budget do not suffice.
    """
    refusal = place_hold(run, call)
    if refusal is None or refusal is WAITS or run.waits_for_credits:
        return call
    return _end(call, InvocationStatus.FAILED, refusal.code, refusal.message)


def refuse_call(call: ToolInvocation, reason: str | None) -> ToolInvocation:
    """PENDING → REFUSED: it costs nothing, and the model receives the refusal with its reason."""
    message = f"The user refused the call: {reason}" if reason else "The user refused the call."
    return _end(call, InvocationStatus.REFUSED, CallError.APPROVAL_REFUSED, message)


def close_open(run: Run, reason: str) -> list[StreamEvent]:
    """What an ending run leaves open: waitpoints → EXPIRED, PENDING calls → CANCELLED, DISPATCHING ones → FAILED. The
    servers of parked calls are told the ``reason``.
    """
    happened: list[StreamEvent] = []
    for waitpoint in Waitpoint.objects.filter(run=run, status=WaitpointStatus.PENDING):
        expired = close_waitpoint(waitpoint, WaitpointStatus.EXPIRED, resolved_at=clock.now())
        happened.append(events.waitpoint_resolved(expired))
    for call in ToolInvocation.objects.filter(run=run).exclude(status__in=FINAL_INVOCATION_STATUSES):
        if call.status == InvocationStatus.PENDING:
            ended = _end(call, InvocationStatus.CANCELLED)
        else:
            message = "The run ended while the tool was at work."
            told = NOT_AWAITING | to_tell(call, reason)
            ended = _end(call, InvocationStatus.FAILED, CallError.OUTCOME_UNKNOWN, message, **told)
        happened.append(events.tool_completed(ended))
    return happened


def to_tell(call: ToolInvocation, reason: str) -> dict[str, Any]:
    """The changes of a call that ends without its tool, whose server is told after the commit."""
    if call.park_seconds is None:
        return {}
    nudge_after_commit(CONTACT, call.id)
    return {"contact_at": clock.now(), "contacts": 0, "end_reason": reason, "remote_task": call.remote_task}


def _end(
    call: ToolInvocation, to: str, code: str | None = None, message: str | None = None, **changes: Any
) -> ToolInvocation:
    return move_call(call, to, error_code=code, error_message=message, finished_at=clock.now(), **changes)
