"""Every transition of a tool invocation; see ``transitions.py`` for the rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import transaction

from config.database.writes import Writes
from config.kernel import clock
from credits import ledger
from runs.lifecycle import events
from runs.lifecycle.events import StreamEvent
from runs.lifecycle.moves import move_run, save_invocation, taken_invocation, tell, write_invocation, write_waitpoint
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    InvocationStatus,
    Run,
    RunStatus,
    ToolInvocation,
    Waitpoint,
    WaitpointStatus,
)
from webhooks.catalogue import Event


class BudgetExceeded(Exception):
    """The call's estimate would take the run over its maxCredits."""


def fail_unmade(call: ToolInvocation, code: str, message: str) -> None:
    """(new) → FAILED: a call that can't be made, before it is first saved."""
    now = clock.now()
    call.status = InvocationStatus.FAILED
    call.error_code, call.error_message = code, message
    call.started_at = call.finished_at = now


@transaction.atomic
def dispatch(run: Run, calls: Sequence[ToolInvocation], approved: bool = False) -> list[ToolInvocation]:
    """PENDING → DISPATCHING with the hold placed, or → FAILED where credits or budget don't reach. Returns those
    dispatched.

    ``approved`` calls got their hold when they were approved.
    """
    # The fence first: it locks the run, so that calls are weighed against its budget one after the other.
    move_run(run, RunStatus.RUNNING, (), owned=True)
    dispatched: list[ToolInvocation] = []
    happened: list[StreamEvent] = []
    for call in calls:
        if approved or place_hold(run, call):
            write_invocation(call, InvocationStatus.DISPATCHING, started_at=clock.now())
            dispatched.append(call)
            happened.append(events.tool_started(call))
        else:
            happened.append(events.tool_completed(call))
    move_run(run, RunStatus.RUNNING, happened, owned=True)
    return dispatched


def place_hold(run: Run, call: ToolInvocation) -> bool:
    """Hold the call's estimate; where that can't be, the call is failed and the answer False."""
    try:
        if exceeds_budget(run, call.credit_estimate):
            raise BudgetExceeded("The call would take the run over its maxCredits.")
        ledger.hold(
            run.user_id,
            call.credit_estimate,
            invocation_id=call.id,
            tool_key=call.name,
            chat_id=run.chat_id,
            run_id=run.id,
            price={"perCall": call.credit_estimate},
        )
    except ledger.InsufficientCredits as refusal:
        _end(call, InvocationStatus.FAILED, code="INSUFFICIENT_CREDITS", message=refusal.message)
        return False
    except BudgetExceeded as refusal:
        _end(call, InvocationStatus.FAILED, code="BUDGET_EXCEEDED", message=str(refusal))
        return False
    return True


def exceeds_budget(run: Run, estimate: int) -> bool:
    return run.max_credits is not None and ledger.would_exceed(run.id, run.max_credits, estimate)


@transaction.atomic
def record_result(
    run: Run, call: ToolInvocation, *, text: str = "", urls: Iterable[str] = (), credit_used: int | None = None
) -> None:
    """DISPATCHING → COMPLETED: the result recorded, its cost captured, the rest of the hold released."""
    used = min(call.credit_estimate if credit_used is None else credit_used, call.credit_estimate)
    _end_owned(run, call, InvocationStatus.COMPLETED, result=text, result_urls=list(urls), credit_used=used)
    ledger.capture(call.id, used)


@transaction.atomic
def record_failure(run: Run, call: ToolInvocation, code: str, message: str) -> None:
    """DISPATCHING (or PENDING) → FAILED: the model is told, the hold released."""
    _end_owned(run, call, InvocationStatus.FAILED, error_code=code, error_message=message)
    ledger.release(call.id)


def _end_owned(run: Run, call: ToolInvocation, to: str, **changes: Any) -> None:
    before = call.status
    changes = taken_invocation(call, to, finished_at=clock.now(), **changes)
    also = Writes()
    if to == InvocationStatus.COMPLETED:
        tell(also, run, Event.TOOL_COMPLETED, **events.tool_webhook(call))
    move_run(run, RunStatus.RUNNING, [events.tool_completed(call)], owned=True, also=also)
    save_invocation(call, before, changes)


def refuse(call: ToolInvocation) -> None:
    """PENDING → REFUSED: it costs nothing, and the model is told."""
    _end(call, InvocationStatus.REFUSED, code="APPROVAL_REFUSED", message="The user refused the call.")


def close_open(run: Run) -> list[StreamEvent]:
    """What an ending run leaves open: waitpoints → EXPIRED, PENDING calls → CANCELLED, DISPATCHING ones → FAILED."""
    happened: list[StreamEvent] = []
    for waitpoint in Waitpoint.objects.filter(run=run, status=WaitpointStatus.PENDING):
        write_waitpoint(waitpoint, WaitpointStatus.EXPIRED, resolved_at=clock.now())
        happened.append(events.waitpoint_resolved(waitpoint))
    for call in ToolInvocation.objects.filter(run=run).exclude(status__in=FINAL_INVOCATION_STATUSES):
        if call.status == InvocationStatus.PENDING:
            _end(call, InvocationStatus.CANCELLED)
        else:
            message = "The run ended while the tool was at work."
            _end(call, InvocationStatus.FAILED, code="OUTCOME_UNKNOWN", message=message)
        happened.append(events.tool_completed(call))
    return happened


def _end(call: ToolInvocation, to: str, *, code: str | None = None, message: str | None = None, **changes: Any) -> None:
    write_invocation(call, to, error_code=code, error_message=message, finished_at=clock.now(), **changes)
