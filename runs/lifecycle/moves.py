"""The three guarded UPDATEs that every status change of runs, invocations and waitpoints is made of.

For ``transitions.py``, ``tool_transitions.py`` and ``waitpoint_transitions.py`` alone: they are the only writers of a
status.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from chats.models import Chat
from config.database.queries import CompiledQuery
from config.database.writes import Writes, update
from config.kernel import clock
from config.kernel.jsontext import to_text
from config.queue import wakeups
from config.queue.nudges import nudge_after_commit
from runs import metrics
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.events import StreamEvent
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent, RunStatus, ToolInvocation, Waitpoint, WaitpointStatus
from webhooks import outbox
from webhooks.catalogue import Event

EXECUTE = "runs.execute_run"
# A start's or a resume's own nudge has this long before the sweep sends another.
NUDGE_GRACE = timedelta(seconds=5)


class LeaseLost(Exception):
    """The run is no longer this worker's: nothing was written, and nothing more may be."""


def move_run(
    run: Run, to: str, happened: Sequence[StreamEvent], *, owned: bool, also: Writes | None = None, **changes: Any
) -> None:
    """Move ``run`` to ``to`` and append ``happened`` to its stream; for a change within a status, ``to`` is that
    status.

    ``owned``: only if the lease that ``run`` was claimed under still holds. Raises LeaseLost if the row is not as
    ``run`` says; then nothing of ``also``, which is written by the same statement, is written either.
    """
    # The index too: after a commit whose answer was lost, the row is ahead of ``run``, and what was done must not be
    # done again.
    found = {"id": run.pk, "status": run.status, "last_stream_index": run.last_stream_index}
    if owned:
        found |= {"lease_token": run.lease_token, "worker_id": run.worker_id}
    now = clock.now()
    changes |= {
        "status": to,
        "last_stream_index": run.last_stream_index + len(happened),
        "updated_at": now,
    }
    writes = Writes()
    writes.update(Run, found, changes)
    writes.insert(*new_events(run, happened, now, ends=to in FINAL_RUN_STATUSES))
    if also is not None:
        writes.include(also)
    if not writes.do():
        raise LeaseLost(run.pk)
    if happened:
        wakeups.after_commit(run.pk)
    left = run.status == RunStatus.RUNNING and to != RunStatus.RUNNING
    if run.status != to:
        crash_after_commit(to)
        metrics.run_moved(run, to, changes)
    _take(run, changes)
    if left:
        # It made room for another of its user's.
        for waiting in _next_throttled(run.user_id):
            nudge_after_commit(EXECUTE, waiting.pk)


def new_events(run: Run, happened: Sequence[StreamEvent], at: datetime, *, ends: bool = False) -> list[RunEvent]:
    """The rows of ``happened``, after the events of ``run``'s stream. ``ends``: the last one is final."""
    return [
        RunEvent(
            run_id=run.pk,
            index=run.last_stream_index + offset,
            type=kind,
            data=to_text(data),
            final=ends and offset == len(happened),
            created_at=at,
        )
        for offset, (kind, data) in enumerate(happened, 1)
    ]


def throttled_runs(user_id: int) -> QuerySet[Run]:
    """Those that wait until their user has fewer running, in their order; their ids alone."""
    return Run.objects.filter(user_id=user_id, throttled=True).order_by("created_at", "pk").only("pk")


_next_throttled: CompiledQuery[Run] = CompiledQuery(lambda user_id: throttled_runs(user_id)[:1], int)


def tell(writes: Writes, run: Run, event: Event, **extra: Any) -> None:
    """Have the user's webhook told of what happened to the run; ``extra`` are the event's own fields."""
    outbox.add(
        writes,
        run.user_id,
        event,
        run_id=run.id,
        chat_id=run.chat_id,
        request_id=run.request_id,
        extra=extra,
    )


def write_invocation(call: ToolInvocation, to: str, **changes: Any) -> None:
    """Move an invocation on; its run must be locked or fenced by the same transaction."""
    before = call.status
    changes = taken_invocation(call, to, **changes)
    save_invocation(call, before, changes)


def taken_invocation(call: ToolInvocation, to: str, **changes: Any) -> dict[str, Any]:
    """The first half of ``write_invocation``: in memory only, so that the event that tells of it can go with the
    run's own UPDATE."""
    changes |= {"status": to, "updated_at": clock.now()}
    _take(call, changes)
    return changes


def save_invocation(call: ToolInvocation, before: str, changes: dict[str, Any]) -> None:
    if not update(ToolInvocation, {"id": call.pk, "status": before}, changes):
        raise LeaseLost(call.run_id)
    metrics.call_moved(call, before)


def write_waitpoint(waitpoint: Waitpoint, to: str, **changes: Any) -> None:
    """Move a pending waitpoint on; its run must be locked by the same transaction."""
    changes["status"] = to
    if not Waitpoint.objects.filter(pk=waitpoint.pk, status=WaitpointStatus.PENDING).update(**changes):
        raise LeaseLost(waitpoint.run_id)
    _take(waitpoint, changes)


def _take(row: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(row, name, value)


def stop_running(run: Run) -> dict[str, Any]:
    """The changes by which a run gives its lease up; the running time so far is kept."""
    stretch = clock.now() - run.running_since if run.running_since else timedelta()
    return {
        "worker_id": None,
        "running_since": None,
        "ran_ms": run.ran_ms + max(0, int(stretch.total_seconds() * 1000)),
    }


def lock_run(run_id: str) -> Run | None:
    """The run's row, locked after its chat's."""
    chat_id = Run.objects.filter(pk=run_id).values_list("chat_id", flat=True).first()
    if chat_id is None:
        return None
    Chat.objects.select_for_update(no_key=True).filter(pk=chat_id).values("pk").first()
    return Run.objects.select_for_update().filter(pk=run_id).first()


_next_in_line: CompiledQuery[Run] = CompiledQuery(
    lambda chat_id: (
        Run.objects.filter(chat_id=chat_id, status=RunStatus.QUEUED, blocked=True)
        .order_by("created_at", "pk")
        .only("pk")[:1]
    ),
    str,
)


def promote_next(run: Run) -> str | None:
    """The chat's next run in line becomes its active one: first in, first out. Locks the chat; call it before locking
    the run.

    Returns the promoted run's id, for ``unblock`` once ``run`` has ended. If ``run`` itself is still in line, nothing
    changes.
    """
    active = {"id": run.chat_id, "active_run_id": run.pk}
    if not update(Chat, active, {"active_run_id": None, "updated_at": clock.now()}):
        return None
    # By a statement of its own: it sees what was put in line while the one above waited for the chat.
    following = _next_in_line.first(run.chat_id)
    if following is None:
        return None
    update(Chat, {"id": run.chat_id}, {"active_run_id": following.pk})
    return following.pk


def unblock(run_id: str | None) -> None:
    """Let the promoted run go; only after the other has ended, for a chat has one unblocked live run at most."""
    if run_id is None:
        return
    now = clock.now()
    Run.objects.filter(pk=run_id, blocked=True).update(blocked=False, due_at=now + NUDGE_GRACE, updated_at=now)
    nudge_after_commit(EXECUTE, run_id)
