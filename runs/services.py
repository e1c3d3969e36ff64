"""What callers can do with runs and waitpoints, whichever surface they come from."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Prefetch, QuerySet
from django.db.models.functions import Left
from django.dispatch import receiver

from chats import attachments
from chats.models import Chat, Message
from chats.services import add_message, chat_deleted, locking, title_from
from config.database.queries import CompiledQuery
from config.database.writes import Writes
from config.kernel.errors import Conflict, NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id, new_id
from config.telemetry import logs, tracing
from credits import ledger
from runs import catalogue, lifecycle
from runs.models import LIVE_RUN_STATUSES, Run, RunStatus, ToolInvocation, Waitpoint, WaitpointKind, WaitpointStatus
from runs.serializers import ANSWERS, RESULT_SHOWN_BYTES, AnswerKind


class RunInProgress(Conflict):
    code = "RUN_IN_PROGRESS"
    message = "The chat has a run in progress; wait for it, cancel it, or enqueue behind it."


def _shown_calls() -> QuerySet[ToolInvocation]:
    """Tool calls as a run shows them, in order, with the beginnings of their results, which may be long."""
    # A byte more than is shown: a character has at least one.
    calls = ToolInvocation.objects.annotate(result_start=Left("result", RESULT_SHOWN_BYTES + 1))
    return calls.defer("result", "repeatable").order_by("turn_index", "call_index")


def summaries_of(user: Any) -> QuerySet[Run]:
    """The user's runs in chats that are not deleted, with all that a run's summary shows."""
    pending = Waitpoint.objects.filter(status=WaitpointStatus.PENDING)
    return (
        Run.objects.filter(user=user, chat__deleted_at=None)
        .annotate(credits_spent=ledger.run_spent_subquery())
        .prefetch_related(Prefetch("waitpoints", pending, to_attr="pending_waitpoints"))
    )


def runs_of(user: Any) -> QuerySet[Run]:
    """``summaries_of`` with all that a run's representation shows."""
    return summaries_of(user).prefetch_related(Prefetch("invocations", _shown_calls(), to_attr="calls"))


_run: CompiledQuery[Run] = CompiledQuery(
    lambda user_id, run_id: runs_of(user_id).prefetch_related(None).filter(pk=run_id), int, str
)
_calls: CompiledQuery[ToolInvocation] = CompiledQuery(lambda run_id: _shown_calls().filter(run=run_id), str)
_pending: CompiledQuery[Waitpoint] = CompiledQuery(
    lambda run_id: Waitpoint.objects.filter(run=run_id, status=WaitpointStatus.PENDING), str
)


def find_run(user_id: int, run_id: str) -> Run | None:
    """One run as ``runs_of`` returns it, by compiled queries: it is the most frequent request."""
    run, pending = _run.first(user_id, run_id), list[Waitpoint]()
    if run is None:
        return None
    logs.run_id.set(run_id)
    if run.status == RunStatus.WAITING and not (pending := _pending(run_id)):
        # The waitpoint was answered between the two reads, so the run no longer waits.
        run = _run.first(user_id, run_id) or run
    return _with(run, calls=_calls(run_id), pending_waitpoints=pending)


def as_new(run: Run) -> Run:
    """A run that was just started, as ``runs_of`` returns it, without queries: it has no calls yet."""
    return _with(run, credits_spent=0, calls=[], pending_waitpoints=[])


def _with(run: Run, **shown: Any) -> Run:
    vars(run).update(shown)
    return run


def waitpoints_of(user: Any) -> QuerySet[Waitpoint]:
    return Waitpoint.objects.filter(run__user=user, run__chat__deleted_at=None)


_chat_and_credits: CompiledQuery[Chat] = CompiledQuery(
    lambda user_id, chat_id: locking(user_id, chat_id).annotate(available=ledger.available_subquery()), int, str
)


@transaction.atomic
def start_run(
    user: Any,
    chat_id: str,
    *,
    message: str,
    attachment_ids: list[str] | None = None,
    model: str | None = None,
    tools: list[str] | None = None,
    credit_approval_threshold: int | None = None,
    max_credits: int | None = None,
    on_active_run: str = "reject",
    request_id: str = "",
) -> Run:
    """The user's message and the run that answers it, queued. Amounts are micro-credits.

    Raises ValidationFailed for a model or tool that is not offered or an attachment that can't be used, RunInProgress,
    Conflict if RUN_QUEUE_MAX runs are queued, InsufficientCredits, NotFound if the user has no such chat.
    """
    locked = _chat_and_credits.first(user.pk, chat_id) if is_plausible_id(chat_id) else None
    if locked is None:
        raise NotFound
    _check_offered(model, tools)
    attached = attachments.lock_unused(user, attachment_ids or ())
    if locked.active_run_id is not None:
        if on_active_run != "enqueue":
            raise RunInProgress
        if Run.objects.filter(chat=locked, blocked=True).count() >= settings.RUN_QUEUE_MAX:
            raise Conflict(f"The chat has {settings.RUN_QUEUE_MAX} queued runs; wait until one of them starts.")
    available = vars(locked)["available"]
    if available is None:
        available = ledger.available(user.pk)
    if available <= 0:
        raise ledger.InsufficientCredits(available)
    run_id = new_id("run")
    logs.run_id.set(run_id)
    also = Writes()
    user_message = add_message(also, locked.pk, run_id, Message.Role.USER, message)
    run = Run(
        id=run_id,
        chat=locked,
        user=user,
        user_message_id=user_message.pk,
        requested_model=model,
        tools=tools,
        credit_approval_threshold=credit_approval_threshold,
        max_credits=max_credits,
        request_id=request_id,
        trace_parent=tracing.current(),
    )
    run = lifecycle.enqueue(run, locked, locked.title or title_from(message), also)
    attachments.use(attached, user_message.pk)
    return run


def _check_offered(model: str | None, tools: list[str] | None) -> None:
    offered = catalogue.read()
    problems: dict[str, list[str]] = {}
    if offered.model(model) is None:
        problems["model"] = [
            "There is no default model; name one." if model is None else f"There is no model named {model}."
        ]
    for index, name in enumerate(tools or ()):
        if name not in offered.tools:
            problems[f"tools.{index}"] = [f"There is no tool named {name}."]
    if problems:
        raise ValidationFailed(problems)


def cancel_run(run: Run) -> Run:
    """Request the run's end; a finished run stays unchanged. Returns the run in its new state."""
    lifecycle.request_cancel(run.pk)
    return find_run(run.user_id, run.pk) or run


def respond(waitpoint: Waitpoint, body: dict[str, Any]) -> Waitpoint:
    """Answer a waitpoint. The first answer counts; a resolved waitpoint is returned as it is, whatever the body.

    Raises ValidationFailed or DRF's ValidationError if the body does not answer the pending waitpoint.
    """
    logs.run_id.set(waitpoint.run_id)
    if waitpoint.status != WaitpointStatus.PENDING:
        return waitpoint
    answer = ANSWERS[AnswerKind.validated(body)["kind"]].validated(body)
    if answer["kind"] != waitpoint.kind:
        raise ValidationFailed({"kind": [f"This waitpoint is of the kind {waitpoint.kind}."]})
    field = "approved" if waitpoint.kind == WaitpointKind.CREDIT_APPROVAL else "answer"
    return lifecycle.answer_waitpoint(waitpoint.pk, {field: answer[field]})


@receiver(chat_deleted)
def cancel_runs_of(sender: type, chat_id: str, **kwargs: Any) -> None:
    """Cancel the runs of a deleted chat: those in line first, so that none of them is promoted."""
    live = dict(Run.objects.filter(chat_id=chat_id, status__in=LIVE_RUN_STATUSES).values_list("pk", "blocked"))
    if any(live.values()):
        lifecycle.cancel_line(chat_id)
    # At most one is not in line: the active run.
    for run_id in [run_id for run_id, is_in_line in live.items() if not is_in_line]:
        lifecycle.request_cancel(run_id)
