"""Every transition of a tool call; ``moves`` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
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
from runs.lifecycle.line import lock_user
from runs.lifecycle.moves import Moved, changed, close_waitpoint, fence, move_call, move_run
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
from runs.tools.base import CLIENT, ToolFailure, ToolResult, tool_error
from runs.tools.questions import Dialogue

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


def reject_new_call(call: ToolInvocation, failure: ToolFailure) -> ToolInvocation:
    """(new) → FAILED: a call that cannot be made. It is not stored yet."""
    to, ended = end_of(call, failure)
    return changed(call, status=to, started_at=ended["finished_at"], **ended)


def move_new_call(call: ToolInvocation, to: str, **changes: Any) -> ToolInvocation:
    """``move_call`` for a call that is not stored yet; the same transaction has fenced its run and stores the call."""
    moved = changed(call, status=to, **changes)
    metrics.call_moved(moved, call.status)
    return moved


@transaction.atomic
def dispatch_calls(run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()) -> Moved:
    """``dispatch`` by the run's owner. ``approved`` calls usually have their holds since the approval."""
    # The fence locks the run, so that its calls are compared with its budget one after another.
    fence_to_dispatch(run, calls)
    moved = dispatch(run, calls, move_call, approved)
    run = move_run(run, RunStatus.RUNNING, dispatch_events(moved), owned=True, **awaited(run, moved))
    return Moved(run, moved)


def fence_to_dispatch(run: Run, calls: Iterable[ToolInvocation]) -> None:
    """``fence``, and calls for the caller's app are counted with those of the user's other runs."""
    if any(call.node_type == CLIENT for call in calls):
        lock_user(run.pk)
    fence(run)


def awaited(run: Run, calls: Iterable[ToolInvocation]) -> dict[str, Any]:
    """What calls that have begun to await an outcome change in their run's row."""
    return first_of({run.awaiting, *(call.awaiting for call in calls)})


def first_of(kinds: Container[str | None]) -> dict[str, Any]:
    """What the run's row says of open calls that await outcomes of these kinds."""
    return {"awaiting": next((kind.value for kind in FIRST if kind in kinds), None)}


def room_to_park(user_id: int) -> int:
    """How many calls of the user may still begin to await their outcome (PARKED_CALLS_PER_USER)."""
    calls = ToolInvocation.objects.filter(run__user_id=user_id, run__awaiting__isnull=False, awaiting__isnull=False)
    return settings.PARKED_CALLS_PER_USER - calls.count()


def dispatch(
    run: Run, calls: Sequence[ToolInvocation], move: Callable[..., ToolInvocation], approved: Container[str] = ()
) -> list[ToolInvocation]:
    """PENDING → DISPATCHING with the hold placed, or → FAILED if credits or budget do not suffice; as it is if it has
    to wait for credits, or its run has. No tool begins work that could not be awaited. ``move`` changes a call.
    """
    awaits = {call.id for call in calls if call.node_type == CLIENT or call.park_seconds is not None}
    room = room_to_park(run.user_id) if awaits else 0
    moved: list[ToolInvocation] = []
    for call in calls:
        is_held = call.id in approved and ledger.is_held(call.id)
        try:
            if call.id in awaits and room <= 0:
                raise tool_error(TOO_MANY_PARKED)
            if not (is_held or call.node_type == CLIENT or place_hold(run, call)):
                moved.append(call)
                continue
        except ToolFailure as failure:
            if is_held:
                ledger.release(call.id)
            to, ended = end_of(call, failure)
            moved.append(move(call, to, **ended))
            continue
        room -= call.id in awaits
        changes: dict[str, Any] = {"started_at": clock.now()}
        if call.node_type == CLIENT:  # the caller's app is awaited at once
            expires_at = changes["started_at"] + timedelta(seconds=settings.CLIENT_CALL_SECONDS)
            changes |= {"awaiting": Awaiting.CLIENT.value, "expires_at": expires_at}
        moved.append(move(call, InvocationStatus.DISPATCHING, **changes))
    return moved


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


def place_hold(run: Run, call: ToolInvocation) -> bool:
    """Hold the call's estimate; False if it has to wait for credits, or its run has. Raises ToolFailure if credits or
    budget do not suffice.
    """
    refusal = spending.budget_refusal(run, call.credit_estimate)
    if refusal is None:
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
            return True
        except ledger.InsufficientCredits:
            refusal = spending.refusal(run, call.credit_estimate)
    if refusal is None or run.waits_for_credits:
        return False
    raise ToolFailure(refusal.code, refusal.message)


def end_of(call: ToolInvocation, outcome: ToolResult | ToolFailure) -> tuple[str, dict[str, Any]]:
    """The status that the outcome gives to the call, and its other columns. The call costs its estimate at most."""
    now = clock.now()
    if isinstance(outcome, ToolFailure):
        failed = {"error_code": outcome.code, "error_message": outcome.message, "finished_at": now}
        return InvocationStatus.FAILED, failed
    price = call.credit_estimate
    used = price if outcome.credit_used is None else min(outcome.credit_used, price)
    columns = {"result": outcome.text, "result_urls": list(outcome.urls), "credit_used": used, "finished_at": now}
    return InvocationStatus.COMPLETED, columns


def settle(ended: ToolInvocation) -> None:
    """Capture what the call cost from its hold, and release the rest."""
    if ended.status == InvocationStatus.COMPLETED:
        ledger.capture(ended.id, ended.credit_used)
    else:
        ledger.release(ended.id)


@transaction.atomic
def record_call_result(run: Run, call: ToolInvocation, outcome: ToolResult | ToolFailure, **told: Any) -> Moved:
    """DISPATCHING (or PENDING) → COMPLETED or FAILED by the run's owner: the model receives the result or the error."""
    to, columns = end_of(call, outcome)
    columns |= {"remote_task": ""} | told
    happened = [events.tool_completed(changed(call, status=to, **columns))]
    run = move_run(run, RunStatus.RUNNING, happened, owned=True)
    ended = move_call(call, to, **columns)
    settle(ended)
    return Moved(run, [ended])


@transaction.atomic
def keep_dialogue(run: Run, call: ToolInvocation, remote_task: str) -> Moved:
    """What the server of a call that it has not finished asks the user; or that the call is made again with the
    answers, before they are sent: if this worker is lost then, the outcome is as unknown as that of any call.
    """
    run = move_run(run, RunStatus.RUNNING, (), owned=True)
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
    try:
        place_hold(run, call)
    except ToolFailure as refusal:
        to, ended = end_of(call, refusal)
        return move_call(call, to, **ended)
    return call


def refuse_call(call: ToolInvocation, reason: str | None) -> ToolInvocation:
    """PENDING → REFUSED: it costs nothing, and the model receives the refusal with its reason."""
    message = f"The user refused the call: {reason}" if reason else "The user refused the call."
    refused = {"error_code": CallError.APPROVAL_REFUSED, "error_message": message, "finished_at": clock.now()}
    return move_call(call, InvocationStatus.REFUSED, **refused)


def close_open(run: Run, reason: str) -> list[StreamEvent]:
    """What an ending run leaves open: waitpoints → EXPIRED, PENDING calls → CANCELLED, DISPATCHING ones → FAILED. The
    servers of parked calls are told the ``reason``.
    """
    happened = close_questions(run=run)
    for call in ToolInvocation.objects.filter(run=run).exclude(status__in=FINAL_INVOCATION_STATUSES):
        if call.status == InvocationStatus.PENDING:
            to, ended = InvocationStatus.CANCELLED.value, {"finished_at": clock.now()}
        else:
            failure = ToolFailure(CallError.OUTCOME_UNKNOWN, "The run ended while the tool was at work.")
            to, ended = end_of(call, failure)
            ended |= NOT_AWAITING | to_tell(call, reason)
        happened.append(events.tool_completed(move_call(call, to, **ended)))
    return happened


def close_questions(**of: Any) -> list[StreamEvent]:
    """PENDING → EXPIRED for the waitpoints of a run or a call that has ended. The caller has locked the run."""
    waitpoints = Waitpoint.objects.filter(**of, status=WaitpointStatus.PENDING)
    expired = [close_waitpoint(asked, WaitpointStatus.EXPIRED, resolved_at=clock.now()) for asked in waitpoints]
    return [events.waitpoint_resolved(waitpoint) for waitpoint in expired]


def to_tell(call: ToolInvocation, reason: str) -> dict[str, Any]:
    """The changes of a call that ends without its tool, whose server is told after the commit."""
    if call.park_seconds is None:
        return {}
    nudge_after_commit(CONTACT, call.id)
    return {"contact_at": clock.now(), "contacts": 0, "end_reason": reason, "remote_task": call.remote_task}
