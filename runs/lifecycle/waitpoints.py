"""Every transition of a waitpoint, with those it causes of its run; see ``transitions.py`` for the rules."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from config.kernel import clock
from config.kernel.ids import new_id
from config.queue.nudges import nudge_after_commit
from runs.lifecycle import calls, events, runs
from runs.lifecycle.events import StreamEvent
from runs.lifecycle.moves import EXECUTE, NUDGE_GRACE, lock_run, move_run, promote_next, stop_running, write_waitpoint
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
def open_waitpoint(run: Run, call: ToolInvocation, kind: str, payload: dict[str, Any]) -> Waitpoint:
    """running → waiting: the lease is given up, nothing is held until the answer."""
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
    move_run(run, RunStatus.WAITING, happened, owned=True, **stop_running(run))
    waitpoint.save(force_insert=True)
    return waitpoint


@transaction.atomic
def resolve(waitpoint_id: str, payload: dict[str, Any]) -> Waitpoint:
    """PENDING → COMPLETED and the run waiting → queued; past its time → EXPIRED. Any but the first answer changes
    nothing."""
    waitpoint, run = _lock_waitpoint(waitpoint_id)
    if waitpoint.status != WaitpointStatus.PENDING:
        return waitpoint
    now = clock.now()
    if waitpoint.expires_at <= now:
        return _expire(run, waitpoint)
    resolved = payload | {"respondedAt": clock.iso(now)}
    write_waitpoint(waitpoint, WaitpointStatus.COMPLETED, resolved_payload=resolved, resolved_at=now)
    happened: list[StreamEvent] = [events.waitpoint_resolved(waitpoint)]
    if waitpoint.kind == WaitpointKind.CREDIT_APPROVAL:
        call = waitpoint.invocation
        if not payload["approved"]:
            calls.refuse(call)
        else:
            calls.place_hold(run, call)
        if call.status in FINAL_INVOCATION_STATUSES:
            happened.append(events.tool_completed(call))
    happened.append(events.run_status(run, RunStatus.QUEUED))
    move_run(run, RunStatus.QUEUED, happened, owned=False, due_at=now + NUDGE_GRACE)
    nudge_after_commit(EXECUTE, run.pk)
    return waitpoint


@transaction.atomic
def expire(waitpoint_id: str) -> bool:
    """A pending waitpoint past its time → EXPIRED, and its run → failed. False if there was nothing to do."""
    waitpoint, run = _lock_waitpoint(waitpoint_id)
    if waitpoint.status != WaitpointStatus.PENDING or waitpoint.expires_at > clock.now():
        return False
    _expire(run, waitpoint)
    return True


def _lock_waitpoint(waitpoint_id: str) -> tuple[Waitpoint, Run]:
    """A waitpoint is locked by its run, so it is read once that is locked."""
    run_id = Waitpoint.objects.values_list("run_id", flat=True).get(pk=waitpoint_id)
    run = lock_run(run_id)
    assert run is not None  # noqa: S101  (a waitpoint's row goes with its run's)
    return Waitpoint.objects.select_related("invocation").get(pk=waitpoint_id), run


def _expire(run: Run, waitpoint: Waitpoint) -> Waitpoint:
    runs.finish(
        run,
        RunStatus.FAILED,
        promote_next(run),
        owned=False,
        code="WAITPOINT_EXPIRED",
        message="Nobody answered in time.",
    )
    waitpoint.refresh_from_db()
    return waitpoint
