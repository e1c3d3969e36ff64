"""One request to a model: its hold and its stream, the record of its failure, and what ends a run in its worker."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from config.kernel import clock
from config.kernel.errors import Unavailable
from config.telemetry import tracing
from runs import lifecycle
from runs.catalogue.definitions import ModelDefinition
from runs.engine import spending
from runs.engine.session import Session
from runs.errors import FailureReason, RunError
from runs.llm import files as llm_files
from runs.llm import retry
from runs.llm.base import ModelError, ModelRequest, TextDelta, ToolCall, TurnEnd
from runs.llm.registry import client_for
from runs.models import ModelAttempt, ToolInvocation


class RunFailed(Exception):
    """The run cannot continue. ``code`` is an ``errorCode`` of docs/resources.md, "Runs"; ``message`` is for people;
    ``attempt`` is the failed request, if that is the cause; ``reason`` is for staff.
    """

    def __init__(
        self, code: str, message: str, attempt: ModelAttempt | None = None, reason: FailureReason | None = None
    ) -> None:
        self.code, self.message, self.attempt, self.reason = code, message, attempt, reason
        super().__init__(code, message)


class Exhausted(RunFailed):
    """Credits or budget do not reach for the next step: the ``call``, or without one a request to a model."""

    def __init__(self, refusal: lifecycle.Refusal, call: ToolInvocation | None = None) -> None:
        self.refusal, self.call = refusal, call
        super().__init__(refusal.code, refusal.message)


async def with_files(session: Session, request: ModelRequest, held: contextlib.AsyncExitStack) -> ModelRequest:
    """The request with the content of its files, whose memory ``held`` gives back. Raises ModelError and RunFailed."""
    if not client_for(request.model.server).reads_files:
        return request
    process = session.process
    files = llm_files.with_files(request, session.run.user_id, process.file_threads, process.attachment_bytes)
    try:
        return await held.enter_async_context(files)
    except Unavailable:
        raise RunFailed(RunError.INTERNAL_ERROR, "The message's attachments could not be read.") from None


@dataclass(frozen=True, slots=True)
class Answer:
    allowance: spending.Allowance
    calls: list[ToolCall]
    end: TurnEnd


async def ask(
    session: Session, request: ModelRequest, key: int | str, listen: Callable[[str], object], *, reserve: int = 0
) -> Answer | spending.Wait | lifecycle.Refusal:
    """Hold the most that the request can cost, and make it if credits and budget reach for it. ``listen`` gets the
    text; the other arguments are those of ``spending.allow``. Raises ModelError.
    """
    session.requests += 1
    step, counted, may_count = (key, session.requests), session.counted(), request.model.dialect.counts_tokens
    allowance = await session.db(spending.allow, request, step, counted, reserve, may_count)
    if isinstance(allowance, spending.Unclear):
        if tokens := await client_for(request.model.server).count(request):
            counted[allowance.digest] = tokens
        allowance = await session.db(spending.allow, request, step, counted, reserve)
    if not isinstance(allowance, spending.Allowance):
        assert not isinstance(allowance, spending.Unclear)  # noqa: S101  (the provider was asked)
        return allowance
    request = replace(request, max_output_tokens=allowance.output_tokens)
    session.partial_charge = partial(spending.partial_charge, request, allowance)
    lifecycle.crash_point("before_summary" if request.summarises else "before_model")
    await session.confirm_lease()
    calls: list[ToolCall] = []
    model = request.model
    with tracing.span("model", model=model.name, provider=model.server.name):
        async for event in client_for(model.server).stream(request):
            if isinstance(event, TextDelta):
                listen(event.text)
            elif isinstance(event, ToolCall):
                calls.append(event)
            else:
                return Answer(allowance, calls, event)
    raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The adapter sent no end.")


def failed_request(
    session: Session,
    model: ModelDefinition,
    error: ModelError,
    started_at: datetime,
    chain: Sequence[ModelDefinition],
    *,
    again: bool,
    compaction: int = 0,
) -> ModelAttempt:
    """The row of a failed request, and of what follows it: ``again`` the same model at once, whatever the reason."""
    asked = [earlier.model for earlier in session.journal.failed(compaction)] + [model.name]
    names = [other.name for other in chain]
    following, delay = model.name, 0.0
    if not again:
        following, delay = retry.after(error, asked, names, session.remaining_seconds())
    now = clock.now()
    return ModelAttempt(
        run=session.run,
        turn_index=len(session.journal.turns) + 1,
        compaction=compaction,
        number=len(asked),
        model=model.name,
        provider=model.server.name,
        reason=error.reason,
        http_status=error.status,
        detail=error.detail,
        next_model=following,
        next_at=now + timedelta(seconds=delay) if following else None,
        started_at=started_at,
        finished_at=now,
    )
