"""The guarded UPDATEs that every status change of runs, tool calls and waitpoints consists of, and the lock order.

Only this module holds the key to the protected fields. Lock order: chat or user, run, account; several runs in the
order of their ids. A webhook event only takes a share lock on its endpoint's key, so it may be written at any point.
Row locks are FOR NO KEY UPDATE, so that inserts of rows that refer to a locked row do not wait.
"""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db import models, transaction
from django.db.models import Case, F, Subquery, Value, When

from chats.models import Chat
from config.database.batches import limit_lock_wait
from config.database.protected import take_key
from config.database.writes import Writes
from config.kernel import clock
from config.kernel.jsontext import to_text
from config.queue import publisher
from runs import events, metrics
from runs.events import StreamEvent
from runs.lifecycle import line
from runs.lifecycle.crash import crash_after_commit
from runs.models import ModelAttempt, Run, RunEvent, RunStatus, ToolInvocation, Turn, Waitpoint
from webhooks import outbox

HOUSEKEEPING_LOCK_SECONDS = 0.2  # for which a housekeeping job waits for a locked row (PostgreSQL)

# Fields of a run that a caller gives: they can be long, and parsing them takes time.
WIDE = ("instructions", "client_tools", "output_schema")

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=models.Model)
OfRun = TypeVar("OfRun", ToolInvocation, Waitpoint)
_KEY = take_key(Run, ToolInvocation, Waitpoint)
Calls = Sequence[ToolInvocation]
Events = Sequence[StreamEvent]


class LeaseLost(Exception):
    """The row differs from what the caller knows: usually another worker owns the run. Nothing was written."""


class Moved(NamedTuple):
    """The rows as they are after a transition: the run, the tool calls that it changed, and what it recorded."""

    run: Run
    calls: Calls = ()
    turn: Turn | None = None
    attempt: ModelAttempt | None = None


def changed(row: M, **changes: Any) -> M:
    """A copy of ``row`` with ``changes``: a transition that is rolled back or repeated leaves its arguments alone."""
    copy = type(row).__new__(type(row))
    copy.__dict__ = vars(row) | changes
    return copy


def move_run(
    run: Run, to: str, happened: Events, *, before: Writes | None = None, also: Writes | None = None, **changes: Any
) -> Run:
    """Move ``run`` to the status ``to``, which may be its present one. Append to its stream ``happened`` and, if the
    status is new, the event ``run.status``; record the webhook events that report them. Nudge a worker if ``changes``
    have a ``due_at``. Returns the run as it then is. Raises LeaseLost if the row differs from ``run`` (``as_known``),
    or if a guard of ``before`` finds no row; then nothing is written, also not ``also``.
    """
    now = clock.now()
    if run.status != to:
        happened = [*happened, events.run_status(changed(run, **changes, status=to))]
    changes |= {"status": to, "last_stream_index": run.last_stream_index + len(happened), "updated_at": now}
    known, moved = as_known(run), changed(run, **changes)
    writes = Writes()
    writes.include(before or Writes())
    writes.update(Run, known, changes, _KEY)
    writes.guards = len(writes.statements)
    writes.insert(*new_events(run, happened, now, ends=moved.is_over))
    _emit(writes, run, happened)
    writes.include(also or Writes())
    if not writes.do():
        raise LeaseLost(run.pk)
    if happened:
        publisher.wake_after_commit(run.pk)
    if (run.status == RunStatus.RUNNING and not run.parked) and (to != RunStatus.RUNNING or moved.parked):
        line.nudge_next_throttled(run.user_id)  # the run has given up its place
    if run.status != to:
        crash_after_commit(to)
        _report_after_commit(run, moved)
    if changes.get("due_at") is not None:
        publisher.nudge_after_commit(line.EXECUTE, run.pk)
    return moved


def as_known(run: Run) -> dict[str, Any]:
    """The conditions that the run's row must meet to be as ``run`` says. They show that the owner's lease still holds.
    The stream's index shows a commit that succeeded although its reply was lost: no step may be written twice. A
    requested cancel must be known, because the next move would overwrite it.
    """
    names = ("status", "last_stream_index", "lease_token", "worker_id", "cancel_requested_at")
    return {"id": run.pk} | {name: getattr(run, name) for name in names}


def cancel_line(chat_id: str) -> None:
    """queued → cancelled, for all runs in line of a chat that the caller has locked, with one UPDATE and one INSERT.
    These runs have never executed, so they have no calls, waitpoints, holds or text to end.
    """
    in_line = line.in_line(chat_id)
    runs, now, to = list(in_line.select_for_update(no_key=True).order_by("pk")), clock.now(), RunStatus.CANCELLED
    ended = {"status": to, "blocked": False, "cancel_requested_at": now, "finished_at": now, "due_at": None}
    if in_line.change(_KEY, last_stream_index=F("last_stream_index") + 1, updated_at=now, **ended) != len(runs):
        raise LeaseLost(chat_id)
    if not runs:
        return
    happened = [(run, [events.run_status(changed(run, **ended))]) for run in runs]
    Writes().insert(*(row for run, told in happened for row in new_events(run, told, now, ends=True))).do()
    # If the first event has no endpoint, the others have none either: all runs belong to one user.
    reports = Writes()
    for run, told in happened:
        _emit(reports, run, told)
    reports.do()
    publisher.wake_after_commit(*(run.pk for run in runs))
    crash_after_commit(to)
    for run in runs:
        _report_after_commit(run, changed(run, **ended))


def move_lost(runs: Sequence[Run]) -> None:
    """Take the leases of ``runs``, which are running, locked and have lost their worker, with one UPDATE."""
    now = clock.now()
    rows = Run.objects.filter(pk__in=[run.pk for run in runs], status=RunStatus.RUNNING)
    ran = [When(pk=run.pk, then=Value(stop_running(run)["ran_ms"])) for run in runs]
    stopped = {"running_since": None, "ran_ms": Case(*ran, output_field=models.BigIntegerField())}
    lost = {"worker_id": None, "lease_token": F("lease_token") + 1, "lease_losses": F("lease_losses") + 1}
    if rows.change(_KEY, **stopped, **lost, due_at=now + line.NUDGE_GRACE, updated_at=now) != len(runs):
        raise LeaseLost(runs[0].pk)
    publisher.nudge_after_commit(line.EXECUTE, *(run.pk for run in runs))


def fence(run: Run, *, ends: bool = False) -> Run:
    """Lock a running run for its owner, before the transaction touches anything else. Raises LeaseLost if the row
    differs from ``run``. Returns the run; if the transition ``ends`` it, with a request to cancel that is new.
    """
    known = as_known(run)
    if ends:
        del known["cancel_requested_at"]
    found = Run.objects.select_for_update(no_key=True).filter(**known).values_list("cancel_requested_at").first()
    if run.status != RunStatus.RUNNING or found is None:
        raise LeaseLost(run.pk)
    return changed(run, cancel_requested_at=found[0])


def lock_run(run_id: str, *, wait: bool = True) -> Run | None:
    """The run's row; its chat is locked first. If ``wait`` is false: None if one of the two is locked, and the
    transaction's other locks are waited for only HOUSEKEEPING_LOCK_SECONDS.
    """
    if not wait:
        limit_lock_wait(HOUSEKEEPING_LOCK_SECONDS)
    chat_id = Subquery(Run.objects.filter(pk=run_id).order_by().values("chat_id"))
    chats = Chat.objects.select_for_update(no_key=True, skip_locked=not wait)
    if not chats.filter(pk=chat_id).order_by().values_list("pk"):
        return None
    # No transition that locks a run needs the wide columns.
    runs = Run.objects.select_for_update(no_key=True, skip_locked=not wait).defer(*WIDE)
    return runs.filter(pk=run_id).order_by().first()


def stop_running(run: Run) -> dict[str, Any]:
    """The changes by which a run gives up its lease; its running time so far is kept."""
    stretch = clock.now() - run.running_since if run.running_since else timedelta()
    ran_ms = run.ran_ms + max(0, int(stretch.total_seconds() * 1000))
    return {"worker_id": None, "running_since": None, "ran_ms": ran_ms}


def new_events(run: Run, happened: Events, at: datetime, *, ends: bool = False) -> list[RunEvent]:
    """The rows of ``happened``, after the events of ``run``'s stream. ``ends``: the last one is final."""
    both: dict[str, Any] = {"run_id": run.pk, "created_at": at}
    before, final = run.last_stream_index, len(happened) if ends else 0
    return [
        RunEvent(index=before + number, type=kind, data=to_text(data), final=number == final, **both)
        for number, (kind, data) in enumerate(happened, 1)
    ]


def _emit(writes: Writes, run: Run, happened: Events) -> None:
    for event, own in events.webhooks_of(happened):
        outbox.add(writes, run.user_id, event, own, run)


def move_row(row: OfRun, **changes: Any) -> OfRun:
    """Change a waitpoint, or a tool call for ``move_call``. The same transaction has locked or fenced its run. Returns
    the row as it then is. Raises LeaseLost if the stored status differs from that of ``row``.
    """
    if not Writes().update(type(row), {"id": row.pk, "status": row.status}, changes, _KEY).do():
        raise LeaseLost(row.run_id)
    return changed(row, **changes)


def move_call(call: ToolInvocation, **changes: Any) -> ToolInvocation:
    """``move_row`` for a tool call, whose moves are counted."""
    moved = move_row(call, **changes, updated_at=clock.now())
    metrics.call_moved(moved, call.status)
    return moved


def _report_after_commit(before: Run, run: Run) -> None:
    metrics.run_moved(before, run)
    if run.is_over:
        # Only ids, names of the catalogue and numbers.
        text = "run %s ended: %s, error %s, model %s, agent %s, %.3f s, %d turns, %d tool calls"
        names = run.pk, run.status, run.error_code or "-", run.resolved_model or "-", run.agent or "-"
        numbers = run.ran_ms / 1000, run.turn_count, run.tool_invocation_count
        transaction.on_commit(partial(logger.info, text, *names, *numbers), robust=True)
