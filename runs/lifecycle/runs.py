"""Every transition of a run. Each function is one transaction: a guarded UPDATE with the ledger rows, the stream events
and the webhook events that belong to it. The transitions of the worker that owns the run are fenced by its lease token
and raise ``LeaseLost`` if another worker has taken over; the others lock the run first. ``moves`` has the lock order.
"""

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

from django.db import transaction

from chats.models import Chat, Message
from chats.services import add_message, write_content
from config.database.writes import Writes
from config.kernel import clock
from config.queue.publisher import nudge_after_commit
from runs import catalogue, events, metrics
from runs.errors import FailureReason, RunError
from runs.events import StreamEvent
from runs.lifecycle import calls as call_transitions
from runs.lifecycle import spending
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.line import EXECUTE, NUDGE_GRACE, leave_chat, lock_claimable, promote_next, unblock
from runs.lifecycle.moves import Calls, LeaseLost, Moved, changed, fence, lock_run, move_run, new_events, stop_running
from runs.lifecycle.spending import Charge
from runs.lifecycle.text import recorded_text, reset_events, streamed_text, text_events
from runs.models import Compaction, InvocationStatus, ModelAttempt, Run, RunMetadata, RunStatus, ToolInvocation, Turn

logger = logging.getLogger(__name__)


class ChatChanged(Exception):
    """The chat has changed since it was read; nothing was written."""


class RunFailed(Exception):
    """The run cannot continue. ``code`` is an ``errorCode`` of docs/resources.md, "Runs"; ``message`` is for users;
    ``attempt`` is the failed request, if there is one; without one, ``reason`` says for staff why the run ends.
    """

    def __init__(
        self, code: str, message: str, attempt: ModelAttempt | None = None, reason: FailureReason | None = None
    ) -> None:
        self.code, self.message, self.attempt = code, message, attempt
        self.reason: str | None = reason if attempt is None else attempt.reason
        super().__init__(code, message)


def enqueue(run: Run, chat: Chat, title: str | None, also: Writes, *, locked: bool) -> Run:
    """(new) → queued, in the chat as the caller has read it: active at once, or blocked behind the chat's live runs.
    Returns the run as it is stored. Raises ChatChanged if the chat has changed since, unless it is ``locked``.
    """
    now = run.created_at
    place = {"blocked": chat.active_run_id is not None, "due_at": now + NUDGE_GRACE}
    happened = new_events(run, [events.run_status(run)], now)
    run = changed(run, last_stream_index=len(happened), updated_at=now, **place)
    writes = Writes()
    # Every change of a chat changes one of these fields.
    read = {"active_run_id": chat.active_run_id, "updated_at": chat.updated_at, "deleted_at": None}
    changes = {"active_run_id": chat.active_run_id or run.pk, "has_line": run.blocked}
    changes |= {"title": title, "updated_at": now}
    writes.update(Chat, {"id": chat.pk} | ({} if locked else read), changes)
    writes.insert(run)
    of_run = {"run": run, "user_id": run.user_id, "created_at": now}
    writes.insert(*(RunMetadata(key=key, value=value, **of_run) for key, value in run.metadata.items()))
    writes.insert(*happened)
    writes.include(also)
    if not writes.do():
        raise ChatChanged
    crash_after_commit(RunStatus.QUEUED)
    if not run.blocked:
        nudge_after_commit(EXECUTE, run.pk)
    return run


@transaction.atomic
def request_cancel(run_id: str) -> None:
    """queued, waiting → cancelled at once; the owner of a running run sees the request within a second."""
    run = lock_run(run_id)
    if run is None or run.is_over:
        return
    if run.status != RunStatus.RUNNING or run.worker_id is None:
        finish(run, owned=False, cancel_requested_at=run.cancel_requested_at or clock.now())
    elif run.cancel_requested_at is None:
        move_run(run, RunStatus.RUNNING, (), cancel_requested_at=clock.now())


@transaction.atomic
def claim(run_id: str, worker_id: str) -> Run | None:
    """queued → running, or the takeover of a running run without a worker. None if the run may not execute here now. A
    worker can claim a run that it owns but does not execute: its claim's answer was lost, or the next step failed.
    """
    run = lock_claimable(run_id, worker_id)
    if run is None:
        return None
    now = clock.after(run.created_at)
    changes = stop_running(run) | {"worker_id": worker_id, "lease_token": run.lease_token + 1, "running_since": now}
    changes |= {"due_at": None, "throttled": False, "parked": False}
    happened: list[StreamEvent] = []
    if run.status == RunStatus.RUNNING:
        changes |= spending.settle(run)
        if run.unrecorded_text:
            happened += reset_events(run, recorded_text(run))
            changes["unrecorded_text"] = False
    else:
        changes["started_at"] = run.started_at or now
    if run.resolved_model is None and (models := catalogue.models_of(run)):
        changes["resolved_model"] = models[0].name
    also = Writes()
    if run.assistant_message_id is None:
        role, replaced = Message.Role.ASSISTANT, run.replaced_by is not None
        changes["assistant_message_id"] = add_message(also, run.chat_id, run.id, role, now, replaced=replaced).id
    return move_run(run, RunStatus.RUNNING, happened, also=also, **changes)


@transaction.atomic
def record_turn(
    run: Run, turn: Turn, calls: Calls, *, content: str, delta: str, charge: Charge | None, ready: Calls = ()
) -> Moved:
    """Record a model's response that has tool calls. ``delta`` is the text that was not streamed yet, ``content`` the
    message as it now is. ``calls`` are not stored yet; those that cannot be made are FAILED, those in ``ready`` are
    dispatched. Returns all calls as they are stored.
    """
    call_transitions.fence_to_dispatch(run, ready)
    spending.charge(charge)
    rejected = [call for call in calls if call.status == InvocationStatus.FAILED]
    moved: dict[str, ToolInvocation] = {}
    for call, changes in call_transitions.dispatch(run, ready):
        moved[call.id] = changed(call, **changes)
        metrics.call_moved(moved[call.id], call.status)
    happened = [*text_events(delta), *call_transitions.dispatch_events([*rejected, *moved.values()])]
    stored = [moved.get(call.id, call) for call in calls]
    changes = spending.usage(run, turn) | {"tool_invocation_count": run.tool_invocation_count + len(stored)}
    changes |= call_transitions.awaiting([run.awaiting, *(call.awaiting for call in stored)])
    also = _turn(run, turn, content)
    also.insert(*stored)
    return Moved(move_run(run, RunStatus.RUNNING, happened, also=also, **changes), stored, turn)


def complete(run: Run, turn: Turn, *, content: str, delta: str, charge: Charge | None, **changes: Any) -> Moved:
    """running → completed, with a model's response without tool calls. ``changes`` are columns of the run: ``output``,
    ``finish_reason`` and ``limited_by``. The other arguments are as in ``record_turn``.
    """
    happened = [*text_events(delta), events.message_completed(run, content)]
    also = _turn(run, turn, content)
    ended = {"finished_at": clock.now(), "finish_reason": turn.finish_reason} | changes
    changes = stop_running(run) | spending.usage(run, turn) | ended
    move = functools.partial(move_run, run, RunStatus.COMPLETED, happened, **changes)
    # Usually no run waits behind this one: then one statement does everything (docs/decisions/0011).
    guards, alone = Writes(), Writes()
    leave_chat(run, guards, alone)
    spending.charge_with(run, charge, guards, alone)
    alone.include(also)
    atomic: Any = contextlib.nullcontext if Writes.are_one_statement() else transaction.atomic
    with contextlib.suppress(LeaseLost), atomic():
        return Moved(move(before=guards, also=alone))
    with transaction.atomic():
        promoted = promote_next(run)
        run = move(also=also)
        spending.charge(charge)
        unblock(promoted)
    return Moved(run)


@transaction.atomic
def end_request(run: Run, attempt: ModelAttempt | None, recorded: str, partial: Charge | None) -> Moved:
    """A request to a model ended without an answer, and another one follows. ``attempt``: the failed request; None if
    only the owner's state was out of date. What the provider used is charged, and the streamed text is void.
    """
    fence(run)
    happened = reset_events(run, recorded) if run.unrecorded_text else []
    changes = spending.settle(run, partial) | {"unrecorded_text": False}
    also = Writes()
    if attempt is not None:
        also.insert(attempt)
        if not attempt.compaction:
            happened.append(events.model_retrying(attempt))
            changes["model_retries"] = run.model_retries + 1
    return Moved(move_run(run, RunStatus.RUNNING, happened, also=also, **changes), attempt=attempt)


@transaction.atomic
def record_compaction(run: Run, compaction: Compaction, charge: Charge | None) -> Moved:
    """Record a compaction and charge its summary. Its tokens are part of the run's usage."""
    fence(run)
    spending.charge(charge)
    happened, also = [events.context_compacted(compaction)], Writes().insert(compaction)
    run = move_run(run, RunStatus.RUNNING, happened, also=also, **spending.usage(run, compaction))
    crash_after_commit("compaction")
    return Moved(run)


def _turn(run: Run, turn: Turn, content: str) -> Writes:
    writes = Writes().insert(turn)
    if turn.text and run.assistant_message_id:
        write_content(writes, run.assistant_message_id, content)
    return writes


@transaction.atomic
def hand_over(run: Run) -> Moved:
    """The owner gives up its lease: another worker continues at the next step. This does not count as a lost lease."""
    fence(run)
    changes = spending.settle(run) | stop_running(run)
    changes |= {"lease_token": run.lease_token + 1, "due_at": clock.now() + NUDGE_GRACE}
    return Moved(move_run(run, RunStatus.RUNNING, (), **changes))


@transaction.atomic
def park_run(run: Run) -> Moved:
    """The owner gives up its lease and the run's place: all open calls await outcomes from outside."""
    run = move_run(run, RunStatus.RUNNING, (), **stop_running(run), parked=True, due_at=None)
    crash_after_commit("run_parked")
    return Moved(run)


@transaction.atomic(savepoint=False)
def finish(
    run: Run,
    failure: RunFailed | None = None,
    *,
    owned: bool = True,
    turn: Turn | None = None,
    charge: Charge | None = None,
    delta: str = "",
    partial: Charge | None = None,
    happened: Sequence[StreamEvent] = (),
    **changes: Any,
) -> Moved:
    """→ failed, or without a ``failure`` → cancelled, by the run's owner; if it is not ``owned``, the caller has locked
    it. Open calls and waitpoints are closed, all holds are settled. ``happened``: events before those of the end.

    A complete ``turn`` that fails the run is recorded and charged. ``delta`` is the text of an unrecorded turn that was
    not streamed yet: the message becomes what the stream then has. ``partial`` is what that turn cost.
    """
    promoted = promote_next(run)
    if owned:
        run = fence(run, ends=True)
    if turn is not None:
        Writes().insert(turn).do()
        spending.charge(charge)
        changes |= spending.usage(run, turn)
    to, end_reason = (RunStatus.FAILED, "run_ended") if failure else (RunStatus.CANCELLED, "run_cancelled")
    happened = [*happened, *text_events(delta), *call_transitions.close_open(run, end_reason)]
    changes |= spending.settle(run, partial, ends=True)
    also = Writes()
    if run.assistant_message_id and (delta or run.unrecorded_text):
        content = streamed_text(run) + delta
        write_content(also, run.assistant_message_id, content)
        happened.append(events.message_completed(run, content))
    changes |= dict.fromkeys(("blocked", "throttled", "parked", "unrecorded_text"), False)
    changes |= stop_running(run) | {"awaiting": None, "due_at": None, "finished_at": clock.now()}
    if failure is not None:
        code, attempt = failure.code, failure.attempt
        changes |= {"error_code": code, "error_message": failure.message, "failure_reason": failure.reason}
        if attempt is not None:
            Writes().insert(attempt).do()
        if code == RunError.INSUFFICIENT_CREDITS:
            spending.report_exhausted(run)
        # For staff: only names of this service and numbers. It quotes no text of users or providers.
        text = "run %s failed: %s, reason %s, provider %s, HTTP status %s, attempt %s"
        request = (attempt.provider, attempt.http_status or "-", attempt.number) if attempt else ("-", "-", "-")
        log = functools.partial(logger.warning, text, run.pk, code, failure.reason or "-", *request)
        transaction.on_commit(log, robust=True)
    run = move_run(run, to, happened, also=also, **changes)
    unblock(promoted)
    return Moved(run)
