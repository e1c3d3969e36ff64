"""What callers can do with runs and waitpoints, on both surfaces."""

from contextlib import suppress
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Case, OuterRef, Prefetch, Q, QuerySet, Subquery, When
from django.db.models.functions import Left, Length
from django.dispatch import receiver

from chats import attachments
from chats.models import Chat, Message
from chats.services import add_message, chat_deleted, locking, title_from
from config.api.authentication import WithUser
from config.database.queries import CompiledQuery
from config.database.writes import Writes
from config.kernel import clock, money
from config.kernel.errors import Conflict, NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id, new_id
from config.kernel.jsontext import JSONTextField
from config.telemetry import logs, tracing
from credits import ledger, sums
from credits.models import Account
from runs import catalogue, lifecycle, models
from runs.calls import ANSWERS, AnswerKind, CallResultInput, check_clarification
from runs.models import Run, RunStatus, ToolInvocation, Turn, Waitpoint, WaitpointStatus
from runs.tools.base import RESULT_SHOWN_BYTES, Parked, ToolFailure, ToolResult, clean_result, result_text, tool_error

# Reasoning with more characters, in the provider's format, is not shown.
REASONING_READ_CHARS = 64 * 1024
PENDING = Waitpoint.objects.filter(status=WaitpointStatus.PENDING)
BALANCE = Subquery(Account.objects.filter(pk=OuterRef("user_id")).values("balance"))  # of a chat's user


class RunInProgress(Conflict):
    code = "RUN_IN_PROGRESS"
    message = "The chat has a run in progress; wait for it, cancel it, or enqueue behind it."


def shown_calls() -> QuerySet[ToolInvocation]:
    """Tool calls as a run shows them, in order, with only the beginnings of their results, which may be long."""
    # One more than the shown bytes: a character has at least one byte, so this shows whether the result is cut.
    calls = ToolInvocation.objects.annotate(result_start=Left("result", RESULT_SHOWN_BYTES + 1))
    return calls.defer("result", "repeatable", "remote_task").order_by("turn_index", "call_index")


def _shown(**which: Any) -> QuerySet[Run]:
    runs = Run.objects.filter(**which, chat__deleted_at=None).defer("instructions", "output_schema", "client_tools")
    return runs.annotate(credits_spent=sums.run_spent_subquery())


def summaries_of(user: Any) -> QuerySet[Run]:
    """The user's runs in chats that are not deleted, with all that a run's summary shows."""
    asked = Prefetch("waitpoints", PENDING.all(), to_attr="pending_waitpoints")
    return _shown(user=user).defer("output").prefetch_related(asked)


def _one_run(run_id: str) -> QuerySet[Run]:
    answer = Message.objects.filter(pk=OuterRef("assistant_message_id")).values("content")
    return _shown(pk=run_id).annotate(answer=Subquery(answer))


_run: CompiledQuery[Run] = CompiledQuery(lambda user_id, run_id: _one_run(run_id).filter(user=user_id), int, str)
_run_with_user: WithUser[Run] = WithUser(_one_run, str)
_calls: CompiledQuery[ToolInvocation] = CompiledQuery(lambda run_id: shown_calls().filter(run=run_id), str)
_pending: CompiledQuery[Waitpoint] = CompiledQuery(lambda run_id: PENDING.filter(run=run_id), str)


def find_run(user_id: int, run_id: str) -> Run | None:
    """A run with all that its representation shows. By compiled queries, as this is the most frequent request."""
    return _complete(_run.first(user_id, run_id)) if is_plausible_id(run_id) else None


def find_run_with_user(username: str, run_id: str) -> Run | None:
    """As ``find_run``, by the user's name; the run has its user loaded."""
    return _complete(_run_with_user.first(username, run_id)) if is_plausible_id(run_id) else None


def _complete(run: Run | None) -> Run | None:
    if run is None:
        return None
    logs.run_id.set(run.pk)
    pending: list[Waitpoint] = []
    if run.status == RunStatus.WAITING and not (pending := _pending(run.pk)):
        # The waitpoint was answered between the two reads, so the run no longer waits.
        run = _run.first(run.user_id, run.pk) or run
    # The run's row has the number of calls; most runs have none, and so need no query.
    vars(run).update(calls=_calls(run.pk) if run.tool_invocation_count else [], pending_waitpoints=pending)
    return run


def turns_of(user: Any, run_id: str) -> QuerySet[Turn]:
    """The turns of the user's run, in order, with ``shown_reasoning``. Raises NotFound."""
    if not is_plausible_id(run_id) or not Run.objects.filter(user=user, chat__deleted_at=None, pk=run_id).exists():
        raise NotFound
    # Encrypted items can take megabytes.
    kept = Case(When(reasoning_size__lte=REASONING_READ_CHARS, then="reasoning"), output_field=JSONTextField(null=True))
    turns = Turn.objects.annotate(reasoning_size=Length("reasoning"), shown_reasoning=kept)
    return turns.defer("text", "tool_calls", "reasoning").filter(run=run_id).order_by("index")


def waitpoints_of(user: Any) -> QuerySet[Waitpoint]:
    return Waitpoint.objects.filter(run__user=user, run__chat__deleted_at=None)


def _one_chat(chat_id: str) -> QuerySet[Chat]:
    return Chat.objects.filter(pk=chat_id, deleted_at=None).annotate(balance=BALANCE)


_chat: CompiledQuery[Chat] = CompiledQuery(lambda user_id, chat_id: _one_chat(chat_id).filter(user=user_id), int, str)
# The chat with its user and the user's credits, for ``start_run``.
chat_with_user: WithUser[Chat] = WithUser(_one_chat, str)


def start_run(user: Any, chat_id: str, read: Chat | None = None, **asked: Any) -> Run:
    """Create the user's message and the queued run that answers it. Returns the run in the form of ``find_run``.
    ``asked`` are the arguments of ``_start_run``; ``read`` is from ``chat_with_user``. One statement writes everything,
    and only if the chat has not changed since it was read. So neither a transaction nor a lock is needed, except after
    such a change, and for attachments, ``cancel`` and ``replaces`` (docs/decisions/0033). Raises ValidationFailed for
    an agent, model, tool or attachment that can't be used, RunInProgress, Conflict if RUN_QUEUE_MAX runs are queued,
    InsufficientCredits, NotFound for the chat.
    """
    plain = not asked.get("attachment_ids") and asked.get("on_active_run") != "cancel" and not asked.get("replaces")
    if plain and Writes.are_one_statement():
        with suppress(lifecycle.ChatChanged):
            return _start_run(user, read or _chat_of(user.pk, chat_id), locked=False, **asked)
    with transaction.atomic():
        return _start_run(user, _chat_of(user.pk, chat_id, locked=True), locked=True, **asked)


def _chat_of(user_id: int, chat_id: str, *, locked: bool = False) -> Chat:
    found = None
    if is_plausible_id(chat_id):
        found = locking(user_id, chat_id).annotate(balance=BALANCE).first() if locked else _chat.first(user_id, chat_id)
    if found is None:
        raise NotFound
    return found


def _start_run(
    user: Any,
    chat: Chat,
    *,
    locked: bool,
    message: str | None = None,
    attachment_ids: list[str] | None = None,
    agent: str | None = None,
    model: str | None = None,
    tools: list[str] | None = None,
    metadata: dict[str, str] | None = None,
    on_active_run: str = "reject",
    on_credits_exhausted: str | None = None,
    replaces: str | None = None,
    **columns: Any,
) -> Run:
    """``columns``: further columns of the run, with amounts in micro-credits. ``agent`` is a name or a version,
    ``name@3``; it gives what the other arguments leave out. ``tools`` and ``max_credits`` cannot exceed the agent's.
    ``replaces`` is the id of a run. Without a ``message``, the new run gets the message and attachments of that run.
    """
    own = [tool["name"] for tool in columns.get("client_tools") or ()]
    given = catalogue.check_offered(agent, model, tools, own)
    replaced = _replaced(chat, replaces, on_active_run) if replaces is not None else None
    before = replaced.user_message_id if replaced is not None else None
    if message is None:
        if before is None:
            raise ValidationFailed({"message": ["This field is required."]})
        message = Message.objects.get(pk=before).content
        if attachment_ids is None:
            attachment_ids = [file.pk for file in attachments.attached_to([before]).get(before, ())]
    attached = attachments.lock_usable(user, attachment_ids or (), before)
    if chat.active_run_id is not None and on_active_run != "cancel":
        if on_active_run == "reject":
            raise RunInProgress
        if Run.objects.filter(chat=chat, blocked=True).count() >= settings.RUN_QUEUE_MAX:
            raise Conflict(f"The chat has {settings.RUN_QUEUE_MAX} queued runs; wait until one of them starts.")
    balance = vars(chat)["balance"]
    if balance is None:
        balance = ledger.account_for(user.pk).balance
    # Credits that other runs only hold are no reason to refuse the run: its steps wait for them.
    if balance <= 0:
        raise ledger.InsufficientCredits(ledger.account_for(user.pk).available, user.get_username())
    if chat.active_run_id is not None and on_active_run == "cancel":
        # The active run's owner may have to end it first; then the new run waits behind it.
        cancel_runs_of(Chat, chat.pk)
        chat.refresh_from_db(fields=["active_run_id", "updated_at"])
    run_id = new_id("run")
    logs.run_id.set(run_id)
    also = Writes()
    now = clock.after(chat.updated_at)
    user_message = add_message(also, chat.pk, run_id, Message.Role.USER, now, content=message)
    columns |= {"requested_model": model, "tools": tools, "metadata": metadata or {}, "created_at": now}
    columns |= {"user_message_id": user_message.pk, "trace_parent": tracing.current()}
    run = Run(id=run_id, chat=chat, user=user, **columns)
    if given is not None:
        _take_from_agent(run, given)
        on_credits_exhausted = on_credits_exhausted or given.on_credits_exhausted
    run.waits_for_credits = on_credits_exhausted == models.OnCreditsExhausted.WAIT
    if replaced is not None:
        _replace(replaced, run_id)
    run = lifecycle.enqueue(run, chat, chat.title or title_from(message), also, locked=locked)
    attachments.use(attached, user_message.pk)
    # As ``find_run`` would return it, without its queries: the run has no calls yet.
    vars(run).update(credits_spent=0, answer=None, calls=[], pending_waitpoints=[])
    return run


def _replaced(chat: Chat, run_id: str, on_active_run: str) -> Run:
    """The run of the chat that a new one replaces. It must have ended, unless ``on_active_run`` cancels it."""
    run = Run.objects.filter(pk=run_id, chat=chat).first() if is_plausible_id(run_id) else None
    if run is None:
        raise NotFound("The chat has no such run to replace.")
    if run.status in models.LIVE_RUN_STATUSES and on_active_run != "cancel":
        raise RunInProgress("The run to replace has not finished; wait for it, or cancel it.")
    return run


def _replace(replaced: Run, by: str) -> None:
    """Mark the run, all later runs of its locked chat, and their messages as replaced. A later run that was replaced
    before keeps its mark, so each run is written once, however often the chat's first run is replaced.
    """
    later = Run.objects.filter(chat=replaced.chat_id, created_at__gte=replaced.created_at)
    later.filter(Q(replaced_by=None) | Q(pk=replaced.pk)).update(replaced_by=by)
    # A second statement: it also sees an assistant's message that was added while the first one waited.
    Message.objects.filter(run_id__in=later.order_by().values("pk"), replaced=False).update(replaced=True)


def _take_from_agent(run: Run, agent: models.AgentVersion) -> None:
    """Fill in what the request left out. The engine reads instructions, model, parameters and schema itself."""
    run.agent, run.agent_name = agent.reference, agent.name
    if run.tools is None:
        run.tools = agent.tools
    if run.credit_approval_threshold is None:
        run.credit_approval_threshold = agent.credit_approval_threshold
    if agent.max_credits is not None:
        run.max_credits = min(run.max_credits or agent.max_credits, agent.max_credits)


def require_allowed(surface: str, body: dict[str, Any]) -> None:
    """Check a validated request for a run on a surface. Raises ValidationFailed."""
    if surface == "public" and body.get("instructions") is not None and not settings.RUN_INSTRUCTIONS_PUBLIC:
        raise ValidationFailed({"instructions": ["This service takes no instructions from API keys."]})


def cancel_run(run: Run) -> Run:
    """Request the run's end; a finished run stays unchanged. Returns the run in its new state."""
    lifecycle.request_cancel(run.pk)
    return find_run(run.user_id, run.pk) or run


def stop_runs_of(user_id: int) -> list[str]:
    """Request the end of all runs of the user. Returns the ids of those that have not ended yet."""
    live = Run.objects.filter(user=user_id, status__in=models.LIVE_RUN_STATUSES)
    for run_id in list(live.values_list("pk", flat=True)):
        lifecycle.request_cancel(run_id)
    return list(live.values_list("pk", flat=True))


def respond(waitpoint: Waitpoint, body: Any) -> Waitpoint:
    """Answer a waitpoint. The first answer counts; a resolved waitpoint is returned as it is, whatever the body. Raises
    ValidationFailed or DRF's ValidationError if the body does not answer the pending waitpoint.
    """
    logs.run_id.set(waitpoint.run_id)
    if waitpoint.status != WaitpointStatus.PENDING:
        return waitpoint
    answer = ANSWERS[AnswerKind.validated(body)["kind"]].validated(body)
    if answer["kind"] != waitpoint.kind:
        raise ValidationFailed({"kind": [f"This waitpoint is of the kind {waitpoint.kind}."]})
    given = {name: value for name, value in answer.items() if name != "kind" and value is not None}
    if waitpoint.kind == models.WaitpointKind.CLARIFICATION:
        check_clarification(waitpoint, given)
    budget, changes = given.pop("max_credits", None), {}
    if budget is not None:
        before = waitpoint.run.max_credits
        if waitpoint.needed is None or not given["approved"] or before is None or budget <= before:
            message = "Only the budget of a run that waits for credits can be raised, and not lowered."
            raise ValidationFailed({"maxCredits": [message]})
        given["maxCredits"], changes["max_credits"] = money.to_number(budget), budget
    answered = lifecycle.answer_waitpoint(waitpoint.pk, given, **changes)
    if answered.status == WaitpointStatus.PENDING:  # the answer came too late
        lifecycle.expire_waitpoint(waitpoint.pk, wait=True)
        answered.refresh_from_db()
    return answered


def record_callback(call: ToolInvocation, said: ToolResult | ToolFailure | Parked) -> tuple[ToolInvocation, bool]:
    """Record what a callback says of a call. Only the first outcome counts; too frequent progress is not recorded.
    Returns the call as it then is, and whether something was recorded.
    """
    if call.status in models.FINAL_INVOCATION_STATUSES:
        return call, False
    lifecycle.crash_point("before_outcome")
    return lifecycle.record_outcome(call, said)


def invocations_of(user: Any) -> QuerySet[ToolInvocation]:
    """The user's tool calls in chats that are not deleted, as a run shows them."""
    return shown_calls().filter(run__user=user, run__chat__deleted_at=None)


def submit_result(call: ToolInvocation, body: Any) -> ToolInvocation:
    """Record the outcome of a call that awaits the caller's app. A call that has ended is returned as it is. Raises
    Conflict if the call does not await the app, ValidationFailed or DRF's ValidationError for a wrong body.
    """
    logs.run_id.set(call.run_id)
    if call.status in models.FINAL_INVOCATION_STATUSES:
        return call
    if call.awaiting != models.Awaiting.CLIENT:
        raise Conflict("The call does not await the caller's app.")
    given = CallResultInput.validated(body)
    try:
        error = given.get("error")
        outcome = tool_error(error) if error else clean_result(ToolResult(result_text(call.name, given["result"])))
    except ToolFailure as failure:
        raise ValidationFailed({"result": [failure.message]}) from None
    record_callback(call, outcome)
    return shown_calls().get(pk=call.pk)


@receiver(chat_deleted)
def cancel_runs_of(sender: type, chat_id: str, **kwargs: Any) -> None:
    """Cancel the runs of a deleted chat. Runs in line come first, so that none of them is promoted."""
    live = dict(Run.objects.filter(chat_id=chat_id, status__in=models.LIVE_RUN_STATUSES).values_list("pk", "blocked"))
    if any(live.values()):
        lifecycle.cancel_line(chat_id)
    # At most one is not in line: the active run.
    for run_id in [run_id for run_id, is_in_line in live.items() if not is_in_line]:
        lifecycle.request_cancel(run_id)
