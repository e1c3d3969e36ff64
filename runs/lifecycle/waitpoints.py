"""Every transition of a waitpoint, with the transitions of its run that it causes; ``moves`` has the rules."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from config.kernel import clock
from config.kernel.ids import new_id
from config.queue.nudges import nudge_after_commit
from runs import events
from runs.errors import RunError
from runs.events import StreamEvent
from runs.lifecycle import calls, runs
from runs.lifecycle.line import EXECUTE, NUDGE_GRACE, promote_next
from runs.lifecycle.moves import Moved, close_waitpoint, lock_run, move_run, stop_running
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    Run,
    RunStatus,
    ToolInvocation,
    Waitpoint,
    WaitpointKind,
    WaitpointStatus,
)


@transaction.atomic
def open_waitpoint(run: Run, call: ToolInvocation, kind: str, payload: dict[str, Any]) -> Moved:
    """running → waiting: the lease is given up, and no worker holds anything until the answer."""
    now = clock.now()
    waitpoint = Waitpoint(
        id=new_id("wp"),
        run=run,
        invocation=call,
        kind=kind,
        request_payload=payload,
        created_at=now,
        expires_at=now + timedelta(seconds=settings.WAITPOINT_EXPIRY_SECONDS),
    )
    happened = [events.waitpoint_opened(waitpoint), events.run_status(run, RunStatus.WAITING)]
    run = move_run(run, RunStatus.WAITING, happened, owned=True, **stop_running(run))
    waitpoint.save(force_insert=True)
    return Moved(run)


@transaction.atomic
def answer_waitpoint(waitpoint_id: str, payload: dict[str, Any]) -> Waitpoint:
    """PENDING → COMPLETED and the run waiting → queued; after its time → EXPIRED. Only the first answer changes
    anything. Returns the waitpoint as it then is.
    """
    run = lock_run(_run_of(waitpoint_id))
    assert run is not None  # noqa: S101  (a waitpoint's row is deleted with its run's)
    waitpoint = Waitpoint.objects.select_related("invocation").get(pk=waitpoint_id)
    if waitpoint.status != WaitpointStatus.PENDING:
        return waitpoint
    now = clock.now()
    if waitpoint.expires_at <= now:
        _expire(run)
        return Waitpoint.objects.select_related("invocation").get(pk=waitpoint_id)
    resolved = payload | {"respondedAt": clock.iso(now)}
    waitpoint = close_waitpoint(waitpoint, WaitpointStatus.COMPLETED, resolved_payload=resolved, resolved_at=now)
    happened: list[StreamEvent] = [events.waitpoint_resolved(waitpoint)]
    if waitpoint.kind == WaitpointKind.CREDIT_APPROVAL:
        call = waitpoint.invocation
        call = calls.approve_call(run, call) if payload["approved"] else calls.refuse_call(call, payload.get("reason"))
        if call.status in FINAL_INVOCATION_STATUSES:
            happened.append(events.tool_completed(call))
    happened.append(events.run_status(run, RunStatus.QUEUED))
    move_run(run, RunStatus.QUEUED, happened, owned=False, due_at=now + NUDGE_GRACE)
    nudge_after_commit(EXECUTE, run.pk)
    return waitpoint


@transaction.atomic
def expire_waitpoint(waitpoint_id: str) -> bool:
    """A pending waitpoint after its time → EXPIRED, and its run → failed. False if there was nothing to do, or if the
    run is locked.
    """
    run = lock_run(_run_of(waitpoint_id), wait=False)
    pending = Waitpoint.objects.filter(pk=waitpoint_id, status=WaitpointStatus.PENDING, expires_at__lte=clock.now())
    if run is None or not pending.exists():
        return False
    _expire(run)
    return True


def _run_of(waitpoint_id: str) -> str:
    """The lock of a waitpoint is its run's, so the waitpoint is read once the run is locked."""
    return Waitpoint.objects.values_list("run_id", flat=True).get(pk=waitpoint_id)


def _expire(run: Run) -> None:
    """The end of the run closes its waitpoint."""
    message = "Nobody answered in time."
    runs.finish(run, RunStatus.FAILED, promote_next(run), owned=False, code=RunError.WAITPOINT_EXPIRED, message=message)
