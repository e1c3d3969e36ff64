"""Every transition of a waitpoint, with the transitions of its run that it causes; ``moves`` has the rules."""

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import BigIntegerField, Exists, ExpressionWrapper, F, OuterRef, Q, QuerySet, Subquery, Sum

from config.kernel import clock
from config.kernel.ids import new_id
from config.queue.publisher import nudge_after_commit
from credits import ledger, sums
from credits.models import Account
from runs import events
from runs.apps import RESUME_PAID
from runs.errors import CallError, RunError
from runs.events import StreamEvent
from runs.lifecycle import calls, runs, spending
from runs.lifecycle.line import NUDGE_GRACE
from runs.lifecycle.moves import Moved, lock_run, move_call, move_row, move_run, stop_running
from runs.lifecycle.spending import Refusal
from runs.models import InvocationStatus, Run, RunStatus, ToolInvocation, Waitpoint, WaitpointKind, WaitpointStatus
from runs.tools.base import ToolFailure
from runs.tools.questions import Dialogue

RESUMED_AT_ONCE = 500  # the most runs of one user that are resumed in one call; the sweep resumes the others


@transaction.atomic
def open_waitpoint(run: Run, call: ToolInvocation, kind: str, payload: dict[str, Any], question: int = 0) -> Moved:
    """running → waiting: the lease is given up. ``question`` numbers the questions of the server of the call's tool."""
    asked = {"kind": kind, "invocation": call, "request_payload": payload, "question": question}
    return _open(run, settings.WAITPOINT_EXPIRY_SECONDS, **asked)


@transaction.atomic
def pause(run: Run, refusal: Refusal, call: ToolInvocation | None) -> Moved:
    """running → waiting: credits or budget are not enough for the ``call``, or if None, for a request to a model."""
    tool_name, call_id, given = (call.name, call.id, call.input) if call else ("model", None, {})
    payload: dict[str, Any] = {"toolName": tool_name, "toolInvocationId": call_id, "input": given}
    payload |= {"reason": refusal.code, "estimatedMicro": refusal.needs, "thresholdMicro": max(0, refusal.left)}
    payload["topUpUrl"] = ledger.top_up_url(run.user.get_username()) if settings.TOP_UP_URL else None
    kind = WaitpointKind.CREDIT_APPROVAL
    moved = _open(run, settings.CREDITS_WAIT_SECONDS, kind=kind, request_payload=payload, needed=refusal.needs)
    if refusal.code == RunError.INSUFFICIENT_CREDITS:
        spending.report_exhausted(run)
    nudge_after_commit(RESUME_PAID, str(run.user_id))  # Credits may have been granted since the refusal.
    return moved


def _open(run: Run, seconds: float, **columns: Any) -> Moved:
    now = clock.now()
    expires_at = now + timedelta(seconds=seconds)
    waitpoint = Waitpoint(id=new_id("wp"), run=run, created_at=now, expires_at=expires_at, **columns)
    run = move_run(run, RunStatus.WAITING, [events.waitpoint_moved(waitpoint)], **stop_running(run))
    waitpoint.save(force_insert=True)
    return Moved(run)


@transaction.atomic
def answer_waitpoint(waitpoint_id: str, payload: dict[str, Any], **changes: Any) -> Waitpoint:
    """PENDING → COMPLETED, and the run waiting → queued with ``changes``, or waiting → failed if its user refuses to
    wait for credits. Only the first answer in time counts.
    """
    run, waitpoint = _locked(waitpoint_id)
    if run is None or waitpoint.status != WaitpointStatus.PENDING or waitpoint.expires_at <= clock.now():
        return waitpoint
    return _answer(run, waitpoint, payload, **changes)


def _answer(run: Run, waitpoint: Waitpoint, payload: dict[str, Any], **changes: Any) -> Waitpoint:
    call, asked, now = waitpoint.invocation, waitpoint.request_payload, clock.now()
    resolved = payload | {"respondedAt": clock.iso(now)}
    waitpoint = move_row(waitpoint, status=WaitpointStatus.COMPLETED, resolved_payload=resolved, resolved_at=now)
    if waitpoint.needed is not None and not payload["approved"]:
        refused = Refusal(asked["reason"], asked["estimatedMicro"], asked["thresholdMicro"])
        happened = [events.waitpoint_moved(waitpoint)]
        runs.finish(run, runs.RunFailed(refused.code, refused.message), owned=False, happened=happened)
        return waitpoint
    told = [] if call is None else _answer_call(run, call, waitpoint.kind, payload)
    happened = [events.waitpoint_moved(waitpoint), *told]
    move_run(run, RunStatus.QUEUED, happened, due_at=now + NUDGE_GRACE, **changes)
    return waitpoint


def _answer_call(run: Run, call: ToolInvocation, kind: str, payload: dict[str, Any]) -> list[StreamEvent]:
    """Change an open call by the user's answer to a question about it. An approved call gets its hold and stays
    PENDING, also if it must wait for credits. It becomes FAILED if credits or budget are not enough. A refused call
    becomes REFUSED. Answers to the call's server are stored: a task's server gets them when they are complete, other
    servers get them when the call is made again.
    """
    if kind == WaitpointKind.CLARIFICATION:
        if call.status == InvocationStatus.DISPATCHING:
            dialogue = Dialogue.from_text(call.remote_task).with_answer(payload.get("data"))
            changes: dict[str, Any] = {"remote_task": dialogue.to_text()}
            if call.awaiting and not dialogue.questions:
                changes["contact_at"] = clock.now()
            move_call(call, **changes)
        return []
    if payload["approved"]:
        try:
            spending.hold_call(run, call)
            return []
        except ToolFailure as failure:
            ended = calls.end_of(call, failure)
    else:
        message = "The user refused the call" + (f": {payload['reason']}" if payload.get("reason") else ".")
        ended = {"status": InvocationStatus.REFUSED, "error_code": CallError.APPROVAL_REFUSED}
        ended |= {"error_message": message, "finished_at": clock.now()}
    return [events.tool_completed(move_call(call, **ended))]


def payable() -> QuerySet[Waitpoint]:
    """The waitpoints of runs that wait for credits and can now pay their next step, each run taken alone."""
    covered = Account.objects.filter(pk=OuterRef("run__user_id"), balance__gte=F("held") + OuterRef("needed"))
    waiting = Waitpoint.objects.filter(Exists(covered), status=WaitpointStatus.PENDING, needed__isnull=False)
    spent = ExpressionWrapper(sums.committed_subquery("run_id") + F("needed"), BigIntegerField())
    return waiting.annotate(spent=spent).filter(Q(run__max_credits=None) | Q(run__max_credits__gte=F("spent")))


def resume_paid(user_id: int) -> int:
    """waiting → queued for the user's runs whose next steps the credits can pay, oldest first. A run that needs more
    than is left is passed over; a run whose step finds too few credits waits again. Returns how many were resumed.
    """
    # Runs that were resumed before, and that no worker has taken yet, hold nothing for their next steps.
    queued = Run.objects.filter(user=user_id, status=RunStatus.QUEUED, started_at__isnull=False)
    newest = Waitpoint.objects.filter(run=OuterRef("pk")).order_by("-created_at").values("needed")[:1]
    left = ledger.account_for(user_id).available - queued.aggregate(needed=Sum(Subquery(newest), default=0))["needed"]
    resumed = 0
    in_order = payable().filter(run__user=user_id).order_by("run__created_at", "run_id").values_list("pk", "needed")
    for waitpoint_id, needed in list(in_order[:RESUMED_AT_ONCE]):
        if needed is None or needed > left:
            continue
        with transaction.atomic():
            run, waitpoint = _locked(waitpoint_id, wait=False)
            if run is not None and _answer_if_paid(run, waitpoint):
                left, resumed = left - needed, resumed + 1
    return resumed


def _answer_if_paid(run: Run, waitpoint: Waitpoint) -> bool:
    """Resume a run that waits for credits, if they are enough. Credits that came before the end of the wait count, also
    if no process noticed them at that time; later credits do not.
    """
    if waitpoint.needed is None or not payable().filter(pk=waitpoint.pk).exists():
        return False
    budget = None if run.max_credits is None else run.max_credits - sums.committed(run.pk)
    by, at = sums.reached_by(run.user_id, waitpoint.needed, run.pk, budget)
    if at is not None and at >= waitpoint.expires_at:
        return False
    _answer(run, waitpoint, {"approved": True, "by": by.lower()})
    return True


@transaction.atomic
def expire_waitpoint(waitpoint_id: str, *, wait: bool = False) -> bool:
    """A pending waitpoint after its time → EXPIRED, and its run → failed. But the run is resumed if credits came in
    time. False if there was nothing to do, or if the run is locked and ``wait`` is false.
    """
    run, waitpoint = _locked(waitpoint_id, wait=wait)
    if run is None or waitpoint.status != WaitpointStatus.PENDING or waitpoint.expires_at > clock.now():
        return False
    if not _answer_if_paid(run, waitpoint):
        failure = runs.RunFailed(RunError.WAITPOINT_EXPIRED, "Nobody answered in time.")
        runs.finish(run, failure, owned=False)
    return True


def _locked(waitpoint_id: str, *, wait: bool = True) -> tuple[Run | None, Waitpoint]:
    """The run, locked, and then the waitpoint. With ``wait`` there is always a run: both are deleted together."""
    run = lock_run(Waitpoint.objects.values_list("run_id", flat=True).get(pk=waitpoint_id), wait=wait)
    return run, Waitpoint.objects.select_related("invocation").get(pk=waitpoint_id)
