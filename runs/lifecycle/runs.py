"""Every transition of a run.

Each function is one transaction: a guarded UPDATE with the ledger rows, the stream events and the webhook events that
belong to it. The transitions of the worker that owns the run are fenced by its lease token and raise ``LeaseLost`` if
another worker has taken over; the others lock the run first. ``moves`` has the lock order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, QuerySet

from chats.models import Chat, Message
from chats.services import add_message, write_content
from config.database.batches import limit_lock_wait
from config.database.writes import Writes, insert
from config.kernel import clock
from config.kernel.jsontext import to_text
from config.queue import wakeups
from config.queue.nudges import nudge_after_commit
from credits import ledger
from runs import catalogue, events, metrics
from runs.errors import RunError
from runs.events import StreamEvent, StreamType
from runs.lifecycle import calls as call_transitions
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.line import EXECUTE, NUDGE_GRACE, is_throttled, lock_to_claim, promote_next, unblock
from runs.lifecycle.moves import Moved, changed, emit, fence, lock_run, move_line, move_run, new_events, stop_running
from runs.models import FINAL_RUN_STATUSES, InvocationStatus, Run, RunEvent, RunStatus, ToolInvocation, Turn
from webhooks.catalogue import Event


def enqueue(run: Run, chat: Chat, title: str | None, also: Writes) -> Run:
    """(new) → queued, in the chat that the caller has locked: active at once, or blocked behind the chat's live runs.

    Returns the run as it is stored.
    """
    now = clock.now()
    happened = new_events(run, [events.run_status(run, RunStatus.QUEUED)], now)
    run = changed(
        run,
        status=RunStatus.QUEUED,
        blocked=chat.active_run_id is not None,
        last_stream_index=len(happened),
        created_at=now,
        updated_at=now,
        due_at=now + NUDGE_GRACE,
    )
    writes = Writes()
    writes.insert(run)
    writes.insert(*happened)
    changes = {"active_run_id": chat.active_run_id or run.pk, "title": title, "updated_at": now}
    writes.update(Chat, {"id": chat.pk}, changes)
    writes.include(also)
    writes.do()
    crash_after_commit(RunStatus.QUEUED)
    if not run.blocked:
        nudge_after_commit(EXECUTE, run.pk)
    return run


@transaction.atomic
def request_cancel(run_id: str) -> None:
    """queued, waiting → cancelled at once; the owner of a running run sees the request within a second."""
    run = lock_run(run_id)
    if run is None or run.status in FINAL_RUN_STATUSES:
        return
    requested = run.cancel_requested_at or clock.now()
    if run.status == RunStatus.RUNNING and run.worker_id is not None:
        if run.cancel_requested_at is None:
            move_run(run, RunStatus.RUNNING, (), owned=False, cancel_requested_at=requested)
        return
    finish(run, RunStatus.CANCELLED, promote_next(run), owned=False, cancel_requested_at=requested)


def cancel_line(chat_id: str) -> None:
    """queued → cancelled, for all runs in line of a chat that the caller has locked. They have never run, so there are
    no calls, waitpoints, holds or text to end.
    """
    now = clock.now()
    move_line(
        chat_id,
        RunStatus.CANCELLED,
        blocked=False,
        cancel_requested_at=now,
        finished_at=now,
        due_at=None,
    )


@transaction.atomic
def claim(run_id: str, worker_id: str) -> Run | None:
    """queued → running, or the takeover of a running run that lost its worker. None if another worker has the run or it
    may not execute now.

    A worker claims a run that it owns but does not execute like any other run: the answer to the claim's commit was
    lost, or the step after the claim failed. The claimed run has its user's ``available`` credits as an attribute.
    """
    run = lock_to_claim(run_id)
    if run is None or run.blocked or run.worker_id not in (None, worker_id):
        return None
    if run.status not in (RunStatus.QUEUED, RunStatus.RUNNING) or run.lease_losses >= settings.RUN_LEASE_LOSSES_MAX:
        return None
    begins = run.status == RunStatus.QUEUED
    if begins and is_throttled(run):
        return None
    now = clock.now()
    changes: dict[str, Any] = {
        "worker_id": worker_id,
        "lease_token": run.lease_token + 1,
        "running_since": now,
        "due_at": None,
        "throttled": False,
    }
    if run.worker_id is not None:
        changes["ran_ms"] = stop_running(run)["ran_ms"]
    happened: list[StreamEvent] = []
    also = Writes()
    if run.assistant_message_id is None:
        changes["assistant_message_id"] = add_message(also, run.chat_id, run.id, Message.Role.ASSISTANT).id
    if run.resolved_model is None and (model := catalogue.find_model(run.requested_model)):
        changes["resolved_model"] = model.name
    if begins:
        changes["started_at"] = run.started_at or now
        happened.append(events.run_status(run, RunStatus.RUNNING))
        emit(also, run, Event.AGENT_STARTED)
    elif run.unrecorded_text:
        turns = Turn.objects.filter(run=run).order_by("index")
        happened += _reset(run, join_text(turns.values_list("text", flat=True)))
        changes["unrecorded_text"] = False
    return move_run(run, RunStatus.RUNNING, happened, owned=False, also=also, **changes)


def _reset(run: Run, recorded: str) -> list[StreamEvent]:
    """The message starts again with the text that turns have recorded."""
    return [events.message_reset(run)] + ([events.message_delta(recorded)] if recorded else [])


@transaction.atomic
def reset_text(run: Run, recorded: str) -> Moved:
    """The owner repeats a turn: the text that was streamed of it is void."""
    return Moved(move_run(run, RunStatus.RUNNING, _reset(run, recorded), owned=True, unrecorded_text=False))


@transaction.atomic
def append_text(batch: Sequence[tuple[Run, str]]) -> dict[str, Run]:
    """Append streamed text to many runs at once. Returns those runs by id as they then are; the row of a run that is
    missing is not as ``batch`` says. A run that another transaction has locked is returned as it was given, and nothing
    is written.
    """
    ordered = sorted(batch, key=lambda item: item[0].pk)
    running = Run.objects.filter(pk__in=[run.pk for run, _ in ordered], status=RunStatus.RUNNING).order_by("pk")
    columns = ("pk", "last_stream_index", "lease_token", "worker_id")
    # One locked run must not hold up the text of all runs.
    locked = running.select_for_update(no_key=True, skip_locked=True)
    found = {pk: (index, lease) for pk, index, *lease in locked.values_list(*columns)}
    before = [(run.last_stream_index, [run.lease_token, run.worker_id]) for run, _ in ordered]
    owned = [item for item, as_known in zip(ordered, before, strict=True) if found.get(item[0].pk) == as_known]
    skipped: list[Run] = []
    if len(found) < len(ordered):
        others = {pk: (index, lease) for pk, index, *lease in running.exclude(pk__in=found).values_list(*columns)}
        skipped = [run for (run, _), as_known in zip(ordered, before, strict=True) if others.get(run.pk) == as_known]
        found |= others
    # Only its owner adds to the stream of a running run: a row that is ahead by one under the same lease was written by
    # a commit whose answer was lost. It holds less than ``text`` if more text came before the repetition.
    written = [
        run
        for (run, text), (index, lease) in zip(ordered, before, strict=True)
        if found.get(run.pk) == (index + 1, lease) and _is_last(run, text)
    ]
    now = clock.now()
    RunEvent.objects.bulk_create(
        event for run, text in owned for event in new_events(run, [events.message_delta(text)], now)
    )
    Run.objects.filter(pk__in=[run.pk for run, _ in owned]).update(
        last_stream_index=F("last_stream_index") + 1, unrecorded_text=True, updated_at=now
    )
    wakeups.after_commit(*(run.pk for run, _ in owned))
    return {run.pk: run for run in skipped} | {
        run.pk: changed(run, last_stream_index=run.last_stream_index + 1, unrecorded_text=True)
        for run in [run for run, _ in owned] + written
    }


def _is_last(run: Run, text: str) -> bool:
    """Whether the event after the last one that ``run`` knows is this text."""
    ((kind, data),) = _text(text)
    after = RunEvent.objects.filter(run_id=run.pk, index=run.last_stream_index + 1)
    return after.filter(type=kind, data=to_text(data)).exists()


@transaction.atomic
def record_turn(
    run: Run,
    turn: Turn,
    calls: Sequence[ToolInvocation],
    *,
    content: str,
    delta: str,
    price: dict[str, Any],
    ready: Sequence[ToolInvocation] = (),
) -> Moved:
    """Record a model's response that has tool calls: its text, its usage and its calls.

    ``delta`` is the text that was not streamed yet, ``content`` the message as it now is. ``calls`` are not stored yet,
    and those that cannot be made are FAILED; those in ``ready`` are dispatched. Returns all calls as they are stored.
    """
    fence(run)
    ledger.usage(run.user_id, turn.cost, run_id=run.id, chat_id=run.chat_id, turn_index=turn.index, price=price)
    happened = _text(delta) + [events.tool_completed(call) for call in calls if call.status == InvocationStatus.FAILED]
    dispatched = {call.id: call_transitions.dispatch_new_call(run, call) for call in ready}
    happened += [call_transitions.dispatch_event(call) for call in dispatched.values()]
    stored = [dispatched.get(call.id, call) for call in calls]
    also = _turn(run, turn, content)
    also.insert(*stored)
    changes = {"unrecorded_text": False, "tool_invocation_count": run.tool_invocation_count + len(stored)}
    return Moved(move_run(run, RunStatus.RUNNING, happened, owned=True, also=also, **changes), stored)


@transaction.atomic
def complete(run: Run, turn: Turn, *, content: str, delta: str, price: dict[str, Any]) -> Moved:
    """running → completed, with a model's response that has no tool calls; the arguments are as in ``record_turn``."""
    promoted = promote_next(run)
    happened = _text(delta)
    happened += [events.message_completed(run, content), events.run_status(run, RunStatus.COMPLETED)]
    also = _turn(run, turn, content)
    emit(also, run, Event.AGENT_COMPLETED)
    changes = stop_running(run) | {"unrecorded_text": False, "finished_at": clock.now()}
    run = move_run(run, RunStatus.COMPLETED, happened, owned=True, also=also, **changes)
    ledger.usage(run.user_id, turn.cost, run_id=run.id, chat_id=run.chat_id, turn_index=turn.index, price=price)
    unblock(promoted)
    return Moved(run)


def _text(delta: str) -> list[StreamEvent]:
    return [events.message_delta(delta)] if delta else []


def _turn(run: Run, turn: Turn, content: str) -> Writes:
    writes = Writes()
    writes.insert(turn)
    if turn.text and run.assistant_message_id:
        write_content(writes, run.assistant_message_id, content)
    return writes


@transaction.atomic
def fail(
    run: Run,
    code: str,
    message: str,
    *,
    content: str,
    delta: str,
    turn: Turn | None = None,
    price: dict[str, Any] | None = None,
) -> Moved:
    """running → failed, by its owner. ``content`` is the message with the text of an unrecorded turn, ``delta`` the
    part of it that was not streamed yet. A complete ``turn`` that fails the run is recorded and charged.
    """
    promoted = promote_next(run)
    fence(run)
    if turn is not None:
        insert(turn)
        ledger.usage(
            run.user_id, turn.cost, run_id=run.id, chat_id=run.chat_id, turn_index=turn.index, price=price or {}
        )
    return finish(run, RunStatus.FAILED, promoted, owned=True, code=code, message=message, content=content, delta=delta)


@transaction.atomic
def cancel(run: Run, *, content: str, delta: str) -> Moved:
    """running → cancelled, by its owner; the text is that of ``fail``."""
    promoted = promote_next(run)
    fence(run)
    return finish(run, RunStatus.CANCELLED, promoted, owned=True, content=content, delta=delta)


@transaction.atomic
def hand_over(run: Run) -> Moved:
    """The owner gives up its lease: another worker continues at the next step. This is not a loss."""
    changes = stop_running(run) | {"lease_token": run.lease_token + 1, "due_at": clock.now() + NUDGE_GRACE}
    run = move_run(run, RunStatus.RUNNING, (), owned=True, **changes)
    nudge_after_commit(EXECUTE, run.pk)
    return Moved(run)


def still_owned(runs: Sequence[Run]) -> set[str]:
    """The ids of those runs that are still their owners', even if the rows are ahead of ``runs``. Reads only."""
    leases = {(run.pk, run.lease_token, run.worker_id) for run in runs}
    found = Run.objects.filter(pk__in=[run.pk for run in runs], status=RunStatus.RUNNING)
    return {lease[0] for lease in found.values_list("pk", "lease_token", "worker_id") if lease in leases}


@transaction.atomic
def release(rows: QuerySet[Run], run_id: str) -> str | None:
    """The run, which is one of ``rows``, lost its worker: another may take it over. Returns its id; None if it is not
    one of them any more, or locked.
    """
    limit_lock_wait(settings.HOUSEKEEPING_LOCK_SECONDS)
    run = rows.select_for_update(no_key=True, skip_locked=True).filter(pk=run_id, status=RunStatus.RUNNING).first()
    if run is None:
        return None
    changes = stop_running(run) | {
        "lease_token": run.lease_token + 1,
        "lease_losses": run.lease_losses + 1,
        "due_at": clock.now() + NUDGE_GRACE,
    }
    move_run(run, RunStatus.RUNNING, (), owned=False, **changes)
    nudge_after_commit(EXECUTE, run.pk)
    metrics.lost()
    return run.pk


@transaction.atomic
def give_up(run_id: str) -> None:
    """A running run that lost its worker too often → failed. Any other run, and a locked one, is left as it is."""
    run = lock_run(run_id, wait=False)
    if run is None or run.status != RunStatus.RUNNING or run.worker_id is not None:
        return
    if run.lease_losses >= settings.RUN_LEASE_LOSSES_MAX:
        message = f"The run lost its worker {run.lease_losses} times."
        finish(run, RunStatus.FAILED, promote_next(run), owned=False, code=RunError.WORKER_LOST, message=message)


def finish(
    run: Run,
    to: str,
    promoted: str | None,
    *,
    owned: bool,
    code: str | None = None,
    message: str | None = None,
    content: str | None = None,
    delta: str = "",
    **changes: Any,
) -> Moved:
    """The way into failed and cancelled, inside the caller's transaction, which has locked or fenced the run: open
    calls and waitpoints are closed, all holds are released.

    Without ``content``, the text of an unrecorded turn is read from the stream.
    """
    happened = _text(delta)
    happened += call_transitions.close_open(run)
    ledger.release_run(run.id)
    also = Writes()
    if run.assistant_message_id and (delta or run.unrecorded_text):
        content = streamed_text(run) if content is None else content
        write_content(also, run.assistant_message_id, content)
        happened.append(events.message_completed(run, content))
    happened.append(events.run_status(run, to, code, message))
    changes |= stop_running(run) | {
        "blocked": False,
        "throttled": False,
        "unrecorded_text": False,
        "finished_at": clock.now(),
        "error_code": code,
        "error_message": message,
        "due_at": None,
    }
    if to == RunStatus.FAILED:
        emit(also, run, Event.AGENT_FAILED, errorCode=code)
    run = move_run(run, to, happened, owned=owned, also=also, **changes)
    unblock(promoted)
    return Moved(run)


def join_text(texts: Iterable[str]) -> str:
    """A message's content from its turns' texts."""
    return "\n\n".join(text for text in texts if text)


def streamed_text(run: Run) -> str:
    """The message as its stream has it: the deltas since the last reset."""
    parts: list[str] = []
    rows = RunEvent.objects.filter(run=run, type__in=[StreamType.MESSAGE_DELTA, StreamType.MESSAGE_RESET]).order_by(
        "index"
    )
    for kind, data in rows.values_list("type", "data"):
        if kind == StreamType.MESSAGE_RESET:
            parts.clear()
        else:
            parts.append(json.loads(data)["text"])
    return "".join(parts)
