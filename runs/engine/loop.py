"""The loop of one run: durable steps from the end of its journal, and all ways in which the run ends here. A step is a
turn of the model, or goes on with open tool calls (``calls``). It ends with one transaction that records its outcome;
between two steps, the run can move to another process.

If a run has a schema for its output, the model gives the output as the input of a call of OUTPUT_TOOL, which is checked
like the input of other calls. Such a call is part of its turn: it has no row, approval or price.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any

from django.conf import settings
from django.db import IntegrityError

from config.kernel import clock
from config.kernel.ids import new_id
from config.limits.share import Held
from config.telemetry.logs import request_id
from runs import catalogue, lifecycle
from runs.catalogue.definitions import ModelDefinition
from runs.engine import calls, requests
from runs.engine.context.fit import can_shorten, fit
from runs.engine.context.plan import Plan, request_of
from runs.engine.requests import Answer, Exhausted, RunFailed, ask, failed_request, with_files
from runs.engine.session import Interruption, Session
from runs.errors import FailureReason, RunError
from runs.events import join_text
from runs.llm.base import ModelError, ToolCall
from runs.models import OUTPUT_TOOL, RunStatus, Turn
from runs.tools.base import BUILTIN, ToolDefinition, ToolFailure
from runs.tools.schema import check_input, parse_arguments

logger = logging.getLogger(__name__)

OUTPUT_ATTEMPTS = 3  # the most answers that may miss an `outputSchema`; then the run fails with `OUTPUT_INVALID`
RUN_CALLS_MAX = 1000  # the most tool calls of a run
NOT_ALONE = "Not accepted beside other calls. Call it alone, when you have their results."


async def execute(session: Session) -> None:
    """Execute the run until it ends, waits, is handed over or belongs to another worker. Raises CancelledError if
    another worker has the run or this process ends: then nothing more may be written. Any other error comes from the
    transition that was to end the run.
    """
    request_id.set(session.run.request_id or session.run.id)
    end: tuple[Any, ...] | None = None  # the transition that ends the run, with its arguments
    is_behind = False
    # The journal's length when the database last refused a write because the row was already there.
    refused_at: tuple[int, int, int] | None = None
    while True:
        try:
            if is_behind:
                if not await session.reload():
                    logger.info("run %s is no longer this worker's", session.run.id)
                    return
                is_behind = False
            if end is None and session.run.cancel_requested_at is not None:
                end = (lifecycle.finish,)
            if end is None:
                await _steps(session)
            elif session.run.status == RunStatus.RUNNING:
                await session.step(*end, partial=session.partial_charge(), stores_text=True)
            return
        except asyncio.CancelledError:
            if session.interruption is Interruption.BEHIND:
                session.interruption, is_behind = None, True
            elif session.interruption is Interruption.REQUESTED:
                end = (lifecycle.finish,)
            else:
                raise
        except lifecycle.LeaseLost:
            is_behind = True
        except RunFailed as failure:
            end = (lifecycle.finish, failure)
        except Exception as error:
            if end is not None:
                raise
            # The answer to a commit was lost, and the repeated step found its own rows: the session is behind.
            if isinstance(error, IntegrityError) and refused_at != session.journal.length:
                logger.warning("run %s is read again after a write that was already there", session.run.id)
                refused_at, is_behind = session.journal.length, True
                continue
            logger.exception("run %s failed for an unexpected reason", session.run.id)
            end = (lifecycle.finish, RunFailed(RunError.INTERNAL_ERROR, "Something went wrong on our side."))


async def _steps(session: Session) -> None:
    try:
        async with asyncio.timeout(max(0.0, session.remaining_seconds())) as scope:
            while session.run.status == RunStatus.RUNNING and not session.run.parked:
                if session.process.draining:
                    await session.step(lifecycle.hand_over)
                    return
                try:
                    if session.journal.open_calls:
                        await calls.resume(session)
                    else:
                        await try_turn(session)
                except Exhausted as step:
                    if not session.run.waits_for_credits:
                        raise
                    await session.step(lifecycle.pause, step.refusal, step.call)
    except TimeoutError:
        if not scope.expired():
            raise
        raise RunFailed(RunError.RUN_TIMEOUT, "The run took longer than it may.") from None


async def try_turn(session: Session) -> None:
    """Make one request for the next turn and record the turn, or the failure; after a failure that may pass, another
    request follows. Returns without a request if the process drains, or if staff have changed the model meanwhile.
    """
    if len(session.journal.turns) >= settings.RUN_TURN_LIMIT:
        message = f"The run reached its limit of {settings.RUN_TURN_LIMIT} turns."
        raise RunFailed(RunError.TURN_LIMIT_EXCEEDED, message)
    if not await session.wait_for_retry():
        return
    chain = await _chain(session)
    model = _model(session, chain)
    session.turn_text.clear()
    started_at = clock.now()
    try:
        plan = await fit(session, model)
        if plan is None:
            return
        async with contextlib.AsyncExitStack() as held:
            # Before the place is taken: a run that waits for its user's memory must not block other users.
            request = await with_files(session, request_of(session, plan), held)
            place = session.process.model_places.hold(model.server, session.run.user_id)
            may_begin = await held.enter_async_context(place)
            started_at = clock.now()
            # Staff can have changed the model during the wait.
            chain = await _chain(session)
            if not may_begin or _model(session, chain) != model:
                return
            answer = await ask(session, request, request.turn_index, session.add_text)
    except ModelError as error:
        await _record_failure(session, chain, model, started_at, error)
    except requests.Short as short:
        if short.refusal is None:
            await session.wait_for_credits(short.needs)
        else:
            session.too_dear[model.name] = short.refusal  # perhaps a fallback is cheaper
    else:
        lifecycle.crash_point("after_model")
        await _record(session, model, plan, answer, started_at)


async def _chain(session: Session) -> list[ModelDefinition]:
    """The models that the run may ask, in order, as the catalogue has them now."""
    names = catalogue.requested_model(session.run, session.agent), session.run.resolved_model
    chain = catalogue.remembered().chain(*names)
    if not chain:
        chain = await session.process.db_for(session.run.user_id, catalogue.find_models, *names)
    if session.agent is None or not session.agent.parameters:
        return chain
    return [replace(model, parameters={**model.parameters, **session.agent.parameters}) for model in chain]


def _model(session: Session, chain: list[ModelDefinition]) -> ModelDefinition:
    """The model to ask. Models for which credits or budget are not enough are passed over. Raises RunFailed."""
    for model in requests.to_ask(chain, session.journal.failed()):
        if model.name not in session.too_dear:
            return model
    if session.too_dear:
        raise Exhausted(min(session.too_dear.values(), key=attrgetter("needs")))
    reason = FailureReason.MODEL_UNKNOWN
    raise RunFailed(reason.code, "The model is no longer offered.", reason=reason)


async def _record_failure(
    session: Session, chain: list[ModelDefinition], model: ModelDefinition, started_at: datetime, error: ModelError
) -> None:
    """Record the failed request and what follows it. Raises RunFailed if no request follows."""
    again = error.reason is FailureReason.CONTEXT_TOO_LONG and can_shorten(session, model)
    attempt = failed_request(session, model, error, started_at, chain, again=again)
    if not attempt.next_model:
        raise RunFailed(error.reason.code, error.message, attempt)
    lifecycle.crash_point("before_failed_attempt")
    await session.end_request(attempt)
    session.too_dear.clear()  # credits or prices can have changed meanwhile
    lifecycle.crash_point("after_failed_attempt")


async def _record(session: Session, model: ModelDefinition, plan: Plan, given: Answer, started_at: datetime) -> None:
    """Record the turn, which completes or fails the run. Otherwise make those of its calls that need no approval."""
    end, usage, allowance = given.end, given.end.usage, given.allowance
    read = partial(_read_output, session.output_schema, given.calls)
    threads, gives_output = session.process.tool_threads, any(call.name == OUTPUT_TOOL for call in given.calls)
    recorded, tool_calls, output = await threads.run(session.run.user_id, read) if gives_output else read()
    charge = requests.charge_of(model, usage, allowance.hold)
    turn = Turn(
        run=session.run,
        index=len(session.journal.turns) + 1,
        model=model.name,
        origin=model.origin,
        text="".join(session.turn_text),
        tool_calls=recorded,
        reasoning=list(end.reasoning),
        finish_reason=end.finish_reason,
        **asdict(usage),
        held=allowance.hold.amount if allowance.hold else 0,
        cost=charge.charged,
        request_digest=allowance.size.beginnings[-1][0] if allowance.size.beginnings else "",
        context_bytes=plan.size(plan.history.cut),
        started_at=started_at,
        finished_at=clock.now(),
    )
    if not usage.estimated and requests.is_news(allowance, usage.input_tokens):
        await session.process.db(requests.learn_count, allowance, usage.input_tokens)
    lifecycle.crash_point("before_dispatch")
    record, content = partial(session.step, stores_text=True), join_text([session.journal.text, turn.text])
    if not tool_calls and (session.output_schema is None or output is not None):
        ends: dict[str, Any] = {"output": output, "finish_reason": "stop"}
        if output is None:
            ends = {"limited_by": allowance.limited_by if end.finish_reason == "length" else None}
        await record(lifecycle.complete, turn, content=content, charge=charge, **ends)
        return
    tries = sum(all("key" in call for call in row.tool_calls) for row in [*session.journal.turns, turn])
    if not tool_calls and tries >= OUTPUT_ATTEMPTS:
        message = f"The model gave no output that fits the schema, {OUTPUT_ATTEMPTS} times."
        await record(lifecycle.finish, RunFailed(RunError.OUTPUT_INVALID, message), turn=turn, charge=charge)
        return
    if len(session.journal.calls) + len(tool_calls) > RUN_CALLS_MAX:
        turn.tool_calls = []
        message = f"The run needed more than its limit of {RUN_CALLS_MAX} tool calls."
        await record(lifecycle.finish, RunFailed(RunError.CALL_LIMIT_EXCEEDED, message), turn=turn, charge=charge)
        return
    new = await calls.new_invocations(session, turn.index, tool_calls)
    ready = calls.needs_no_approval(session, new)
    with Held(session.process.tool_places, session.run.user_id) as held:
        placed = calls.take_places(held, ready)
        await record(lifecycle.record_turn, turn, new, content=content, charge=charge, ready=placed)
        await calls.execute(session, held, ready)


def _read_output(
    schema: Mapping[str, Any] | None, calls: Sequence[ToolCall]
) -> tuple[list[dict[str, Any]], list[ToolCall], dict[str, Any] | None]:
    """The calls as the turn records them, the calls to make, and the output or None: the input of the first OUTPUT_TOOL
    call that fits the schema, in a turn without calls of tools. ``told`` tells the model why others do not count.
    """
    recorded: list[dict[str, Any]] = []
    others = [call for call in calls if schema is None or call.name != OUTPUT_TOOL]
    output: dict[str, Any] | None = None
    for call in calls:
        row: dict[str, Any] = {"id": call.id, "name": call.name, "arguments": call.arguments}
        if schema is not None and call.name == OUTPUT_TOOL:
            row |= {"key": new_id("out"), "told": NOT_ALONE}
            if not others and output is None:
                try:
                    given = parse_arguments(call.arguments)
                    check_input(ToolDefinition(OUTPUT_TOOL, OUTPUT_TOOL, "", BUILTIN, schema, 0), given)
                    row["told"], output = None, given
                except ToolFailure as failure:
                    row["told"] = f"{failure.code}: {failure.message}"
        recorded.append(row)
    return recorded, others, output
