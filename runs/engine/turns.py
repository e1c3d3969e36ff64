"""One turn of a run: the model is asked, its text streamed, and its response recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime

from django.conf import settings

from config.kernel import clock, money
from config.kernel.errors import Unavailable
from config.telemetry import tracing
from runs import lifecycle
from runs.engine import calls, context
from runs.engine.session import Session
from runs.errors import RunError
from runs.llm.base import ModelError, TextDelta, ToolCall, Usage
from runs.llm.files import with_files
from runs.llm.registry import client_for
from runs.models import AgentModel, ToolInvocation, Turn

# A model's own account of its usage is input like any other.
TOKENS_MAX = 1_000_000_000


class RunFailed(Exception):
    """The run cannot continue. ``code`` is an ``errorCode`` of docs/api.md, "Runs"; ``message`` is for people."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(code, message)


async def make_turn(session: Session, model: AgentModel) -> None:
    """Raises RunFailed."""
    if session.checked:
        session.checked, refusal = False, session.refusal
    else:
        refusal = await session.db(context.refusal, len(session.journal.turns))
    if refusal:
        raise RunFailed(*refusal)
    lifecycle.crash_point("before_model")
    started_at = clock.now()
    session.turn_text.clear()
    tool_calls, usage = await _ask_model(session, model)
    lifecycle.crash_point("after_model")
    await _record(session, model, started_at, tool_calls, usage)


async def _ask_model(session: Session, model: AgentModel) -> tuple[list[ToolCall], Usage]:
    tool_calls: list[ToolCall] = []
    usage = Usage(0, 0)
    try:
        client = client_for(model.provider)
        request = context.request(session.run, session.history, session.journal, session.tools(), model.provider_model)
        process, user_id = session.process, session.run.user_id
        files = with_files(request, user_id, process.file_threads, process.attachment_bytes)
        async with files if client.reads_files else contextlib.nullcontext(request) as request:
            await session.confirm_lease()
            with tracing.span("model", model=model.name, provider=model.provider):
                async for event in client.stream(request):
                    if isinstance(event, TextDelta):
                        session.add_text(event.text)
                    elif isinstance(event, ToolCall):
                        tool_calls.append(event)
                    else:
                        usage = event
    except ModelError as error:
        raise RunFailed(error.code, str(error)) from None
    except Unavailable:
        raise RunFailed(RunError.INTERNAL_ERROR, "The message's attachments could not be read.") from None
    return tool_calls, Usage(min(usage.input_tokens, TOKENS_MAX), min(usage.output_tokens, TOKENS_MAX))


async def _record(
    session: Session, model: AgentModel, started_at: datetime, tool_calls: list[ToolCall], usage: Usage
) -> None:
    """Record the turn, which completes the run if it has no calls and fails it if it has too many; otherwise make the
    calls that need no approval.
    """
    cost_in = money.price(usage.input_tokens, model.price_in)
    cost_out = money.price(usage.output_tokens, model.price_out)
    turn = Turn(
        run=session.run,
        index=len(session.journal.turns) + 1,
        model=model.name,
        text="".join(session.turn_text),
        tool_calls=[{"id": call.id, "name": call.name, "arguments": call.arguments} for call in tool_calls],
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cost=cost_in + cost_out,
        started_at=started_at,
        finished_at=clock.now(),
    )
    price = {
        "model": model.name,
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "in": model.price_in,
        "out": model.price_out,
    }
    lifecycle.crash_point("before_dispatch")
    if not tool_calls:
        await session.record(lifecycle.complete, turn, price=price)
        return
    if len(session.journal.calls) + len(tool_calls) > settings.RUN_CALLS_MAX:
        turn.tool_calls = []
        message = f"The run needed more than its limit of {settings.RUN_CALLS_MAX} tool calls."
        await session.record(lifecycle.fail, RunError.CALL_LIMIT_EXCEEDED, message, turn=turn, price=price)
        return
    new = await calls.new_invocations(session, turn.index, tool_calls)
    ready = calls.needs_no_approval(session, new)

    async def record(placed: list[ToolInvocation]) -> Sequence[ToolInvocation]:
        stored = await session.record(lifecycle.record_turn, turn, new, price=price, ready=placed)
        session.journal.turns.append(turn)
        session.turn_text.clear()
        return stored

    await calls.execute(session, ready, record)
