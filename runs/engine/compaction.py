"""Shortens a chat's transcript before a turn that would not fit into its model's window. Each step is recorded: later
turns and later runs of the chat use it, and another worker that takes the run over does not repeat it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from django.conf import settings

from config.kernel import clock
from runs import catalogue, lifecycle
from runs.catalogue.definitions import ModelDefinition
from runs.engine import context, history, spending, summary
from runs.engine.budget import BYTES_PER_TOKEN, BYTES_PER_TOKEN_MAX, Plan, Step, output_limit, room, summary_tokens
from runs.engine.failure import failed_request
from runs.engine.session import Session
from runs.errors import FailureReason
from runs.llm import retry
from runs.llm.base import ModelError, ModelRequest, TextDelta, TurnEnd, UserMessage
from runs.llm.registry import client_for
from runs.models import Compaction, CompactionKind, ModelAttempt, Run

logger = logging.getLogger(__name__)

# What a summary reads at once, in bytes for each token of its model's room: fewer than there are in a dense text, and
# after a refusal as too long a quarter.
PIECE_BYTES_PER_TOKEN = 2
SMALLER = 4
SMALLER_TIMES = 3
# Of the results in a run that is larger than a piece.
RESULT_CHARS = 2000
TOO_LONG = FailureReason.CONTEXT_TOO_LONG
# Failures that the same runs of the chat cause again. After any other, a later run tries to summarise them.
SAME_AGAIN = {
    TOO_LONG,
    FailureReason.REQUEST_REFUSED,
    FailureReason.CONTENT_FILTERED,
    FailureReason.NO_TEXT,
    FailureReason.OUTPUT_LIMIT,
    FailureReason.ANSWER_TOO_LONG,
    FailureReason.MODEL_FAILED,
    FailureReason.TIME_OUT,
}


async def fit(session: Session, model: ModelDefinition) -> Plan | None:
    """The transcript of the next turn, shortened until it fits. None if the process drains.

    Raises ModelError for a message that no window can hold, and RunFailed.
    """
    if not _can_hold(session, model):
        detail = f"The message alone is too long for a window of {model.context_tokens} tokens."
        raise ModelError(FailureReason.CONTEXT_TOO_LONG, detail=detail)
    while True:
        plan = context.plan(session, model)
        step = _next_step(session, plan)
        if step is None or step.cut == plan.cut:
            return plan
        if session.process.draining:
            return None
        if step.kind == CompactionKind.SUMMARY and not _is_for_run(session):
            if not await _summarise(session, plan, step):
                return None
        else:
            step = plan.left_out(step) if step.kind == CompactionKind.SUMMARY else step
            await _record(session, plan, _compaction(session, step, clock.now()))


def can_shorten(session: Session, model: ModelDefinition) -> bool:
    """Whether a request that was refused as too long is tried again: once with half of its size, and then in the
    shortest form.
    """
    if not _can_hold(session, model):
        return False
    return _refusals(session, model) < 2 and context.plan(session, model).shortest() is not None


def _can_hold(session: Session, model: ModelDefinition) -> bool:
    """Whether any tokenizer could fit the message alone into the model's window."""
    return len(session.history.message.text.encode()) <= BYTES_PER_TOKEN_MAX * model.context_tokens


def is_fresh(session: Session) -> bool:
    """Whether the transcript was shortened since the last turn: the next request is not that turn's with more."""
    newest = session.history.compaction
    return newest is not None and (newest.run_id, newest.turn_index) == (session.run.id, _turn_index(session))


def _is_for_run(session: Session) -> bool:
    """Whether the newest compaction counts for this run only: then so do those after it, without a summary, because
    runs are missing that later runs of the chat are to have.
    """
    newest = session.history.compaction
    return newest is not None and newest.only_run


def _turn_index(session: Session) -> int:
    return len(session.journal.turns) + 1


def _refusals(session: Session, model: ModelDefinition) -> int:
    failed = session.journal.failed_attempts
    return sum(attempt.reason == TOO_LONG and attempt.model == model.name for attempt in failed)


def _next_step(session: Session, plan: Plan) -> Step | None:
    refusals, newest = _refusals(session, plan.model), session.history.compaction
    if refusals:
        failed = len(session.journal.failed_attempts)
        if not is_fresh(session) or newest is None or newest.failed_attempts < failed:
            return (plan.next_step(plan.now // 2) if refusals == 1 else None) or plan.shortest()
    return plan.next_step()


def _compaction(session: Session, step: Step, started_at: datetime) -> Compaction:
    """The row of a step, without its estimate and a summary."""
    cut = step.cut
    return Compaction(
        chat_id=session.run.chat_id,
        run=session.run,
        index=_next_index(session),
        turn_index=_turn_index(session),
        failed_attempts=len(session.journal.failed_attempts),
        kind=step.kind,
        only_run=step.only_run or _is_for_run(session),
        last_run_id=cut.last_run_id,
        text=cut.text,
        notes_run_id=cut.notes_run_id,
        notes_turn=cut.notes_turn,
        short_turn=cut.short_turn,
        result_chars=cut.result_chars,
        result_turn=cut.result_turn,
        tokens_before=step.before,
        started_at=started_at,
    )


async def _record(session: Session, plan: Plan, compaction: Compaction, charge: lifecycle.Charge | None = None) -> None:
    shortened = session.history.shortened(compaction)
    compaction.tokens_after = replace(plan, history=shortened).now
    compaction.finished_at = clock.now()
    await session.move(lifecycle.record_compaction, compaction, charge)
    session.history = shortened


async def _summarise(session: Session, plan: Plan, step: Step) -> bool:
    """Summarise the runs up to ``step.cut.last_run_id``, piece by piece: each summary contains the one before. After
    failures, the next model is asked, as for a turn. Without an answer of any, the runs are left out; also if credits
    or budget do not reach for a summary and the turn after it. False if the process drains, or if no model is offered
    any more.
    """
    models, answered, is_refused = _summarisers(session, plan.model), "", False
    refused = Counter(attempt.model for attempt in _failed(session) if attempt.reason == TOO_LONG)
    started_at = clock.now()
    while models or is_refused:
        failed = _failed(session)
        if session.process.draining or not await session.wait_until(failed[-1].next_at if failed else None):
            return False
        model = _next_model(models, failed, answered)
        if model is None:
            compaction = _compaction(session, plan.left_out(step), started_at)
            compaction.failure_reason = failed[-1].reason if failed else ""
            last = {attempt.model: attempt.reason for attempt in failed}
            compaction.only_run |= is_refused or not SAME_AGAIN.issuperset(last.values())
            await _record(session, plan, compaction)
            return True
        piece_bytes = room(model) * PIECE_BYTES_PER_TOKEN // SMALLER ** refused[model.name]
        piece = _piece(plan.earlier(), str(step.cut.last_run_id), piece_bytes)
        request = await _request(session, plan, model, piece, piece_bytes)
        asked_at = clock.now()
        try:
            answer = await _ask(session, request, plan, step)
        except ModelError as error:
            asked = [attempt.model for attempt in failed] + [model.name]
            following = retry.after(error, asked, [model.name for model in models], session.remaining_seconds())
            if error.reason == TOO_LONG and refused[model.name] < SMALLER_TIMES:
                refused[model.name] += 1
                following = retry.NextRequest(model.name, 0.0)
            await session.record_failed_summary(
                failed_request(
                    session.run,
                    _turn_index(session),
                    model,
                    error,
                    asked_at,
                    following,
                    number=len(failed) + 1,
                    compaction=_next_index(session),
                )
            )
            continue
        if answer is None:
            return False
        if isinstance(answer, spending.Wait):
            await session.wait_for_credits(answer.least)
            continue
        if isinstance(answer, str):
            models, is_refused = [other for other in models if other.name != model.name], True
            continue
        text, end, allowance = answer
        charge = spending.charge_of(model, end.usage, allowance.hold)
        part = replace(step, before=plan.now, cut=replace(plan.cut, last_run_id=piece[-1], text=text))
        compaction = _compaction(session, part, asked_at)
        compaction.model = model.name
        compaction.input_tokens, compaction.output_tokens = end.usage.input_tokens, end.usage.output_tokens
        compaction.cached_tokens = end.usage.cached_tokens
        compaction.held = allowance.hold.amount if allowance.hold else 0
        compaction.cost = charge.charged
        await _record(session, plan, compaction, charge)
        if piece[-1] == step.cut.last_run_id:
            return True
        plan, answered, started_at = context.plan(session, plan.model), model.name, clock.now()
    return False


def _summarisers(session: Session, own: ModelDefinition) -> list[ModelDefinition]:
    """The models that may summarise, in order. Without the parameters of an agent: the chat's runs share a summary."""
    known = catalogue.remembered()
    chosen = settings.RUN_SUMMARY_MODEL
    if chosen and chosen not in known.models:
        logger.warning("RUN_SUMMARY_MODEL is not an enabled model: %s summarises", own.name)
    chain = known.chain(session.requested_model, session.run.resolved_model)
    names = dict.fromkeys([chosen, own.name, *(model.name for model in chain)])
    return [summary.without_format(known.models[name]) for name in names if name in known.models]


def _failed(session: Session) -> list[ModelAttempt]:
    """The failed requests for the next compaction's summary."""
    index = _next_index(session)
    return [attempt for attempt in session.journal.failed_summaries if attempt.compaction == index]


def _next_model(
    models: Sequence[ModelDefinition], failed: Sequence[ModelAttempt], answered: str
) -> ModelDefinition | None:
    """What the last failed request decided; otherwise the model that ``answered`` last, or the first one."""
    if failed and not failed[-1].next_model:
        return None
    wanted = failed[-1].next_model if failed else answered
    asked = {attempt.model for attempt in failed}
    found = next((model for model in models if model.name == wanted), None)
    return found or next((model for model in models if model.name not in asked), None)


def _piece(earlier: Sequence[tuple[str, int]], last: str, most: int) -> list[str]:
    """The oldest runs that have at most so many bytes, and at least one."""
    piece: list[str] = []
    for run_id, size in earlier:
        most -= size
        if piece and most < 0:
            break
        piece.append(run_id)
        if run_id == last:
            break
    return piece


async def _request(
    session: Session, plan: Plan, model: ModelDefinition, piece: Sequence[str], piece_bytes: int
) -> ModelRequest:
    sizes = dict(plan.earlier())
    result_chars = piece_bytes if sum(sizes[run_id] for run_id in piece) <= piece_bytes else RESULT_CHARS
    text = await session.db(_text, piece, result_chars, plan.cut.text, piece_bytes)
    return ModelRequest(
        model=model,
        messages=(UserMessage(text),),
        tools=(),
        run_id=session.run.id,
        chat_id=session.run.chat_id,
        turn_index=_turn_index(session),
        max_output_tokens=min(summary_tokens(plan.model) * summary.reasoning_factor(model), output_limit(model)),
        instructions=summary.INSTRUCTIONS,
        summarises=True,
    )


def _text(run: Run, piece: Sequence[str], result_chars: int, before: str, most: int) -> str:
    return summary.written(history.read_whole(piece, result_chars), before, most)


async def _ask(
    session: Session, request: ModelRequest, plan: Plan, step: Step
) -> tuple[str, TurnEnd, spending.Allowance] | spending.Wait | str | None:
    """The summary. None if the process drains, an errorCode if credits or budget do not suffice. Raises ModelError."""
    reserve = _cost_after(session, plan, step)
    most = summary_tokens(plan.model) * BYTES_PER_TOKEN_MAX
    async with session.process.model_places.hold(request.model.server, session.run.user_id) as may_begin:
        if not may_begin:
            return None
        session.requests += 1
        key = lifecycle.compaction_key(_next_index(session))
        allowance = await session.db(spending.allow, request, (), (key, session.requests), reserve)
        if isinstance(allowance, spending.Wait):
            return allowance
        if not isinstance(allowance, spending.Allowance):
            return allowance[0]
        request = replace(request, max_output_tokens=allowance.output_tokens)
        session.partial_charge = partial(spending.partial_charge, request, allowance)
        lifecycle.crash_point("before_summary")
        await session.confirm_lease()
        text: list[str] = []
        async for event in client_for(request.model.server).stream(request):
            if isinstance(event, TextDelta):
                text.append(event.text)
            elif isinstance(event, TurnEnd):
                lifecycle.crash_point("after_summary")
                if said := "".join(text).encode()[:most].decode(errors="ignore").strip():
                    return said, event, allowance
                # The same request has the same answer again.
                raise ModelError(FailureReason.NO_TEXT, detail=f"The answer ended with {event.finish_reason}.")
    raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The adapter sent no end.")


def _cost_after(session: Session, plan: Plan, step: Step) -> int:
    """What the turn needs at least after a summary of the longest size: nobody pays for a summary without a turn."""
    cut = replace(step.cut, text="x" * summary_tokens(plan.model) * BYTES_PER_TOKEN)
    shortened = session.history.shortened(_compaction(session, replace(step, cut=cut), clock.now()))
    return spending.least_cost(context.request(session, replace(plan, history=shortened)))


def _next_index(session: Session) -> int:
    newest = session.history.compaction
    return newest.index + 1 if newest is not None and newest.run_id == session.run.id else 1
