"""Every transition of a tool call; ``moves`` has the rules."""

from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from config.kernel import clock
from credits import ledger
from runs import events
from runs.errors import CallError
from runs.events import StreamEvent
from runs.lifecycle import spending
from runs.lifecycle.line import lock_user
from runs.lifecycle.moves import Moved, changed, fence, move_call, move_row, move_run
from runs.models import Awaiting, InvocationStatus, Run, RunStatus, ToolInvocation, Waitpoint, WaitpointStatus
from runs.tools.base import CLIENT, ToolFailure, ToolResult, tool_error

# The columns of awaiting, as an ended call has them.
NOT_AWAITING: dict[str, Any] = dict.fromkeys(("awaiting", "expires_at", "progress", "contact_at")) | {"remote_task": ""}
TOO_MANY_PARKED = "Too many calls of the user await their outcome."


def reject_new_call(call: ToolInvocation, failure: ToolFailure) -> ToolInvocation:
    """(new) → FAILED: a call that cannot be made. It is not stored yet."""
    ended = end_of(call, failure)
    return changed(call, started_at=ended["finished_at"], **ended)


@transaction.atomic
def dispatch_calls(run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()) -> Moved:
    """``dispatch`` by the run's owner. ``approved`` calls usually have had their holds since the approval."""
    fence_to_dispatch(run, calls)
    moved = [move_call(call, **changes) if changes else call for call, changes in dispatch(run, calls, approved)]
    changes = awaiting([run.awaiting, *(call.awaiting for call in moved)])
    return Moved(move_run(run, RunStatus.RUNNING, list(dispatch_events(moved)), **changes), moved)


def fence_to_dispatch(run: Run, calls: Iterable[ToolInvocation]) -> None:
    """``fence``, so that dispatches of the run's calls see what the others hold of its budget. If a call is for the
    caller's app, the user is locked, too, because such calls are counted over all runs of the user.
    """
    if any(call.node_type == CLIENT for call in calls):
        lock_user(run.pk)
    fence(run)


def awaiting(kinds: Iterable[str | None]) -> dict[str, Any]:
    """The change of the run's row for open calls that await outcomes of these kinds: ``client`` before ``tool``."""
    return {"awaiting": min(filter(None, kinds), default=None)}


def room_to_park(user_id: int) -> int:
    """How many calls of the user may still begin to await their outcome (PARKED_CALLS_PER_USER)."""
    calls = ToolInvocation.objects.filter(run__user_id=user_id, run__awaiting__isnull=False, awaiting__isnull=False)
    return settings.PARKED_CALLS_PER_USER - calls.count()


def dispatch(
    run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()
) -> Iterator[tuple[ToolInvocation, dict[str, Any]]]:
    """PENDING → DISPATCHING with the hold placed, or → FAILED if credits or budget are not enough. No changes mean
    that the call, or its run, must wait for credits. A call whose outcome could not be awaited is not dispatched.
    Yields each call with its changes; the caller, who has fenced the run, writes them.
    """
    awaits = {call.id for call in calls if call.node_type == CLIENT or call.park_seconds is not None}
    room = room_to_park(run.user_id) if awaits else 0
    # Calls for the caller's app come last, so that a client can show them apart from the others.
    for call in sorted(calls, key=lambda call: call.node_type == CLIENT):
        held = ledger.hold_of(call.id) if call.id in approved else None
        try:
            if call.id in awaits and room <= 0:
                raise tool_error(TOO_MANY_PARKED)
            if not (held or call.node_type == CLIENT or spending.hold_call(run, call)):
                yield call, {}
                continue
        except ToolFailure as failure:
            if held:
                ledger.settle(held, 0)
            yield call, end_of(call, failure)
            continue
        room -= call.id in awaits
        changes: dict[str, Any] = {"status": InvocationStatus.DISPATCHING, "started_at": clock.now()}
        if call.node_type == CLIENT:  # the caller's app is awaited at once
            expires_at = changes["started_at"] + timedelta(seconds=settings.CLIENT_CALL_SECONDS)
            changes |= {"awaiting": Awaiting.CLIENT.value, "expires_at": expires_at}
        yield call, changes


def dispatch_events(calls: Iterable[ToolInvocation]) -> Iterator[StreamEvent]:
    """The events of calls that were dispatched, or that failed instead."""
    for call in calls:
        if call.status == InvocationStatus.DISPATCHING:
            yield events.tool_started(call)
            if call.awaiting:
                yield events.tool_parked(call)
        elif call.status != InvocationStatus.PENDING:
            yield events.tool_completed(call)


def end_of(call: ToolInvocation, outcome: ToolResult | ToolFailure) -> dict[str, Any]:
    """The changes of the call by its outcome: COMPLETED or FAILED. The call costs its estimate at most."""
    ended: dict[str, Any] = {"finished_at": clock.now()}
    if isinstance(outcome, ToolFailure):
        failed = {"error_code": outcome.code, "error_message": outcome.message}
        return ended | {"status": InvocationStatus.FAILED} | failed
    price = call.credit_estimate
    used = price if outcome.credit_used is None else min(outcome.credit_used, price)
    result = {"result": outcome.text, "result_urls": list(outcome.urls), "credit_used": used}
    return ended | {"status": InvocationStatus.COMPLETED} | result


@transaction.atomic
def record_call_result(run: Run, call: ToolInvocation, outcome: ToolResult | ToolFailure, **told: Any) -> Moved:
    """DISPATCHING (or PENDING) → COMPLETED or FAILED by the run's owner: the model receives the result or the error."""
    columns = end_of(call, outcome) | {"remote_task": ""} | told
    happened = [events.tool_completed(changed(call, **columns))]
    run = move_run(run, RunStatus.RUNNING, happened)
    ended = move_call(call, **columns)
    ledger.capture(ended.id, ended.credit_used)
    return Moved(run, [ended])


@transaction.atomic
def keep_dialogue(run: Run, call: ToolInvocation, remote_task: str) -> Moved:
    """Store a question of the server of an open call to the user; or, before the call is made again with the answers,
    that it is made again. If this worker is lost then, the outcome is as unknown as that of any call.
    """
    run = move_run(run, RunStatus.RUNNING, ())
    return Moved(run, [move_call(call, remote_task=remote_task)])


def close_open(run: Run, reason: str) -> list[StreamEvent]:
    """Close what an ending run leaves open: waitpoints → EXPIRED, PENDING calls → CANCELLED, other calls → FAILED."""
    happened = close_questions(run=run)
    for call in ToolInvocation.open_of(run):
        if call.status == InvocationStatus.PENDING:
            ended: dict[str, Any] = {"status": InvocationStatus.CANCELLED, "finished_at": clock.now()}
        else:
            failure = ToolFailure(CallError.OUTCOME_UNKNOWN, "The run ended while the tool was at work.")
            ended = end_of(call, failure) | NOT_AWAITING | to_tell(call, reason)
        happened.append(events.tool_completed(move_call(call, **ended)))
    return happened


def close_questions(**of: Any) -> list[StreamEvent]:
    """PENDING → EXPIRED for the waitpoints of a run or a call that has ended. The caller has locked the run."""
    waitpoints = Waitpoint.objects.filter(**of, status=WaitpointStatus.PENDING)
    ended = {"status": WaitpointStatus.EXPIRED, "resolved_at": clock.now()}
    return [events.waitpoint_moved(move_row(waitpoint, **ended)) for waitpoint in waitpoints]


def to_tell(call: ToolInvocation, reason: str) -> dict[str, Any]:
    """The changes of a call that ends without an outcome of its tool. The tool's server is told so soon after."""
    if call.park_seconds is None:
        return {}
    return {"contact_at": clock.now(), "contacts": 0, "end_reason": reason, "remote_task": call.remote_task}
