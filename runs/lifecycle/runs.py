"""Every transition of a run. With ``tool_transitions.py`` and ``waitpoint_transitions.py`` the only writer of their
statuses.

Each function is one transition: a guarded UPDATE in a transaction that also writes the ledger rows, the stream events
and the webhook events. Those of the worker that owns a run are fenced by its lease token and raise ``LeaseLost`` when
another has taken over; those that anybody may cause lock the run first. Lock order: chat or user, run, account; several
runs in the order of their ids. A webhook event only shares its endpoint's key, at any place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.expressions import Combinable, RawSQL
from django.db.models.functions import Coalesce

from chats.models import Chat
from chats.services import add_message, write_content
from config.database.queries import CompiledQuery
from config.database.writes import Writes
from config.kernel import clock
from config.kernel.jsontext import to_text
from config.queue import wakeups
from config.queue.nudges import nudge_after_commit
from credits import ledger
from runs import catalogue, metrics
from runs.lifecycle import calls as call_moves
from runs.lifecycle import events
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.events import StreamEvent
from runs.lifecycle.moves import (
    EXECUTE,
    NUDGE_GRACE,
    lock_run,
    move_run,
    new_events,
    promote_next,
    stop_running,
    tell,
    unblock,
)
from runs.models import FINAL_RUN_STATUSES, InvocationStatus, Run, RunEvent, RunStatus, ToolInvocation, Turn
from webhooks.catalogue import Event


def enqueue(run: Run, chat: Chat, title: str | None, also: Writes) -> None:
    """(new) → queued, in the chat that the caller has locked: active at once, or blocked behind its live runs."""
    now = clock.now()
    run.blocked = chat.active_run_id is not None
    run.created_at = run.updated_at = now
    run.due_at = now + NUDGE_GRACE
    run.status = RunStatus.QUEUED
    happened = new_events(run, [events.run_status(run, RunStatus.QUEUED)], now)
    run.last_stream_index = len(happened)
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


def _to_claim(run_id: str) -> QuerySet[Run]:
    """The run, locked, with its user's ``available`` credits and how many others of the user's go ``before`` it: those
    that are running, and those that have waited longer for room.
    """
    longer = Q(created_at__lt=OuterRef("created_at")) | Q(created_at=OuterRef("created_at"), pk__lt=OuterRef("pk"))
    others = Run.objects.filter(user_id=OuterRef("user_id")).exclude(pk=OuterRef("pk")).order_by()
    # Counted apart, for each has an index of its own; none is both. The status is literal: as a parameter, a plan that
    # is kept for all values may read every run that the user ever had.
    running = RawSQL(f"'{RunStatus.RUNNING.value}'", ())  # noqa: S611  (a constant of our own)
    before = _number(others.filter(status=running)) + _number(others.filter(longer, throttled=True))
    return (
        Run.objects.select_for_update().filter(pk=run_id).annotate(available=ledger.available_subquery(), before=before)
    )


def _number(rows: QuerySet[Run]) -> Combinable:
    """How many, as an expression; ``rows`` are one user's."""
    return Coalesce(Subquery(rows.values("user_id").values(number=Count("*"))), Value(0))


_locked_run: CompiledQuery[Run] = CompiledQuery(_to_claim, str)
_locked_user: CompiledQuery[Any] = CompiledQuery(
    lambda run_id: (
        get_user_model()
        ._default_manager.select_for_update(no_key=True)
        .filter(pk=Subquery(Run.objects.filter(pk=run_id).order_by().values("user_id")))
        .only("pk")
    ),
    str,
)


@transaction.atomic
def claim(run_id: str, worker_id: str) -> Run | None:
    """queued → running, or the takeover of a running run that lost its worker. None if another has it or it may not
    run now.

    A worker that does not carry a run which is its own claims it like any other: its claim's commit was answered by
    nobody, or what came after failed. The claimed run has its user's ``available`` credits as an attribute.
    """
    if settings.RUN_USER_LIMIT:
        # Claims of one user's runs take turns, whichever processes make them, and each counts what those before it
        # have made. Who else locks a user locks no run.
        _locked_user(run_id)
    run = _locked_run.first(run_id)
    if run is None or run.blocked or run.worker_id not in (None, worker_id):
        return None
    if run.status not in (RunStatus.QUEUED, RunStatus.RUNNING) or run.lease_losses >= settings.RUN_LEASE_LOSSES_MAX:
        return None
    begins = run.status == RunStatus.QUEUED
    if begins and settings.RUN_USER_LIMIT and vars(run)["before"] >= settings.RUN_USER_LIMIT:
        Run.objects.filter(pk=run.pk).update(throttled=True, due_at=None)
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
        changes["assistant_message_id"] = add_message(also, run.chat_id, run.id, "assistant").id
    model = catalogue.remembered().model(run.requested_model)
    if run.resolved_model is None and model is not None:
        changes["resolved_model"] = model.name
    if begins:
        changes["started_at"] = run.started_at or now
        happened.append(events.run_status(run, RunStatus.RUNNING))
        tell(also, run, Event.AGENT_STARTED)
    elif run.unrecorded_text:
        happened += _reset(
            run, join_text(Turn.objects.filter(run=run).order_by("index").values_list("text", flat=True))
        )
        changes["unrecorded_text"] = False
    move_run(run, RunStatus.RUNNING, happened, owned=False, also=also, **changes)
    return run


def _reset(run: Run, recorded: str) -> list[StreamEvent]:
    """The message starts anew: text that was streamed is overtaken by what is recorded."""
    return [events.message_reset(run)] + ([events.message_delta(recorded)] if recorded else [])


@transaction.atomic
def reset_text(run: Run, recorded: str) -> None:
    """The same by the run's owner, who makes a turn again."""
    move_run(run, RunStatus.RUNNING, _reset(run, recorded), owned=True, unrecorded_text=False)


@transaction.atomic
def write_deltas(batch: Sequence[tuple[Run, str]]) -> set[str]:
    """Append streamed text to many runs at once. Returns the ids of those that are no longer this worker's."""
    ordered = sorted(batch, key=lambda item: item[0].pk)
    found = {
        pk: (index, lease)
        for pk, index, *lease in Run.objects.select_for_update()
        .filter(pk__in=[run.pk for run, _ in ordered], status=RunStatus.RUNNING)
        .order_by("pk")
        .values_list("pk", "last_stream_index", "lease_token", "worker_id")
    }
    before = [(run.last_stream_index, [run.lease_token, run.worker_id]) for run, _ in ordered]
    owned = [item for item, as_known in zip(ordered, before, strict=True) if found.get(item[0].pk) == as_known]
    # Only its owner adds to the stream of a running run: one that is ahead by one under the same lease was written by
    # a commit whose answer was lost.
    written = [
        run for (run, _), (index, lease) in zip(ordered, before, strict=True) if found.get(run.pk) == (index + 1, lease)
    ]
    RunEvent.objects.bulk_create(
        RunEvent(
            run_id=run.pk,
            index=run.last_stream_index + 1,
            type="message.delta",
            data=to_text(events.message_delta(text)[1]),
        )
        for run, text in owned
    )
    Run.objects.filter(pk__in=[run.pk for run, _ in owned]).update(
        last_stream_index=F("last_stream_index") + 1, unrecorded_text=True, updated_at=clock.now()
    )
    wakeups.after_commit(*(run.pk for run, _ in owned))
    current = [run for run, _ in owned] + written
    for run in current:
        run.last_stream_index += 1
        run.unrecorded_text = True
    return {run.pk for run, _ in ordered} - {run.pk for run in current}


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
) -> list[ToolInvocation]:
    """Record a model's response: its text, its usage and its calls; without calls the run completes with it.

    ``delta`` is the text that was not streamed yet, ``content`` the message as it now stands. ``calls`` arrive
    unsaved, those that can't be made already failed; the ``ready`` ones of them are dispatched at once. Returns the
    dispatched.
    """
    final = not calls
    promoted = promote_next(run) if final else None
    happened: list[StreamEvent] = [events.message_delta(delta)] if delta else []
    happened += [events.tool_completed(call) for call in calls if call.status == InvocationStatus.FAILED]
    changes: dict[str, Any] = {"unrecorded_text": False}
    also = Writes()
    also.insert(turn)
    also.insert(*calls)
    if turn.text and run.assistant_message_id:
        write_content(also, run.assistant_message_id, content)
    if final:
        happened.append(events.message_completed(run, content))
        happened.append(events.run_status(run, RunStatus.COMPLETED))
        changes |= stop_running(run) | {"finished_at": clock.now()}
        tell(also, run, Event.AGENT_COMPLETED)
    move_run(run, RunStatus.COMPLETED if final else RunStatus.RUNNING, happened, owned=True, also=also, **changes)
    ledger.usage(run.user_id, turn.cost, run_id=run.id, chat_id=run.chat_id, turn_index=turn.index, price=price)
    if final:
        unblock(promoted)
        return []
    return call_moves.dispatch(run, ready) if ready else []


@transaction.atomic
def fail(run: Run, code: str, message: str, content: str | None = None, delta: str = "") -> None:
    """running → failed, by its owner. ``content`` is the message with the text streamed so far, ``delta`` what of it
    was not yet."""
    promoted = promote_next(run)
    finish(run, RunStatus.FAILED, promoted, owned=True, code=code, message=message, content=content, delta=delta)


@transaction.atomic
def finish_cancelled(run: Run, content: str | None = None, delta: str = "") -> None:
    """running → cancelled, by its owner."""
    promoted = promote_next(run)
    finish(run, RunStatus.CANCELLED, promoted, owned=True, content=content, delta=delta)


@transaction.atomic
def cancel(run_id: str) -> None:
    """queued, waiting → cancelled at once; of a running run the owner is told, and stops within a second."""
    run = lock_run(run_id)
    if run is None or run.status in FINAL_RUN_STATUSES:
        return
    requested = run.cancel_requested_at or clock.now()
    if run.status == RunStatus.RUNNING and run.worker_id is not None:
        if run.cancel_requested_at is None:
            move_run(run, RunStatus.RUNNING, (), owned=False, cancel_requested_at=requested)
        return
    finish(run, RunStatus.CANCELLED, promote_next(run), owned=False, cancel_requested_at=requested)


@transaction.atomic
def hand_over(run: Run) -> None:
    """Give the lease up, by its owner: another worker goes on at the next step. Not a loss."""
    changes = stop_running(run) | {"lease_token": run.lease_token + 1, "due_at": clock.now() + NUDGE_GRACE}
    move_run(run, RunStatus.RUNNING, (), owned=True, **changes)
    nudge_after_commit(EXECUTE, run.pk)


def confirm_lease(run: Run) -> None:
    """Raises LeaseLost if the run is no longer its owner's; changes nothing."""
    move_run(run, RunStatus.RUNNING, (), owned=True)


@transaction.atomic
def lose_worker(worker_id: str, run_ids: Iterable[str] | None = None) -> None:
    """The worker's lease expired: its runs, or those named, are up for takeover."""
    runs = Run.objects.select_for_update().filter(worker_id=worker_id, status=RunStatus.RUNNING)
    if run_ids is not None:
        runs = runs.filter(pk__in=list(run_ids))
    lost = list(runs.order_by("pk"))
    for run in lost:
        changes = stop_running(run) | {
            "lease_token": run.lease_token + 1,
            "lease_losses": run.lease_losses + 1,
            "due_at": clock.now() + NUDGE_GRACE,
        }
        move_run(run, RunStatus.RUNNING, (), owned=False, **changes)
        nudge_after_commit(EXECUTE, run.pk)
    metrics.losses(len(lost))


@transaction.atomic
def give_up(run_id: str) -> bool:
    """A running run that lost its worker too often → failed. False if it is not such a run."""
    run = lock_run(run_id)
    if run is None or run.status != RunStatus.RUNNING or run.worker_id is not None:
        return False
    if run.lease_losses < settings.RUN_LEASE_LOSSES_MAX:
        return False
    message = f"The run lost its worker {run.lease_losses} times."
    finish(run, RunStatus.FAILED, promote_next(run), owned=False, code="WORKER_LOST", message=message)
    return True


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
) -> None:
    """The way into failed and cancelled, inside the caller's transaction: what is open is closed, every hold is
    released."""
    if owned:
        move_run(run, run.status, (), owned=True)  # the fence, before anything else is touched
    happened: list[StreamEvent] = [events.message_delta(delta)] if delta else []
    happened += call_moves.close_open(run)
    ledger.release_run(run.id)
    if content is None and run.unrecorded_text:
        content = streamed_text(run)
    also = Writes()
    if content is not None and run.assistant_message_id:
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
        tell(also, run, Event.AGENT_FAILED, errorCode=code)
    move_run(run, to, happened, owned=owned, also=also, **changes)
    unblock(promoted)


def join_text(texts: Iterable[str]) -> str:
    """A message's content from its turns' texts."""
    return "\n\n".join(text for text in texts if text)


def streamed_text(run: Run) -> str:
    """The message as its stream tells it: the deltas since the last reset."""
    parts: list[str] = []
    told = RunEvent.objects.filter(run=run, type__in=["message.delta", "message.reset"]).order_by("index")
    for kind, data in told.values_list("type", "data"):
        if kind == "message.reset":
            parts.clear()
        else:
            parts.append(json.loads(data)["text"])
    return "".join(parts)
