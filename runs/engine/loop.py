"""The agent loop of one run: durable steps, one after the other, from whatever its journal records.

Runs on the engine's event loop. Each step waits on a model, on tools or on nothing, and ends with what it found being
recorded in one transaction; between steps the run can move to another process. Never touches the database but through
``Engine.db``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from django.db import IntegrityError

from config.kernel import clock, money
from config.kernel.errors import Unavailable
from config.telemetry import tracing
from config.telemetry.logs import request_id
from runs import catalogue
from runs.engine import journal as journals
from runs.engine.calls import RunCalls
from runs.lifecycle import runs
from runs.lifecycle.crash import crash_point
from runs.lifecycle.moves import LeaseLost
from runs.llm.base import ModelError, TextDelta, ToolCall, Usage
from runs.llm.files import with_files
from runs.llm.registry import client_for
from runs.models import AgentModel, RunStatus, Turn

if TYPE_CHECKING:
    from runs.engine.engine import Engine

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

TOKENS_MAX = 1_000_000_000


class RunFailed(Exception):
    """The run can't go on; ``code`` is one of the contract's errorCodes, ``message`` for people."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(code, message)


class RunLoop:
    """Carries one claimed run until it ends, waits, is cancelled, lost or handed over."""

    def __init__(self, engine: Engine, journal: journals.Journal) -> None:
        self.engine = engine
        self.journal = journal
        self.run = journal.run
        self.calls = RunCalls(self)
        # Guards the run's row in memory: its own steps, its calls' results and the text flusher take turns.
        self.lock = asyncio.Lock()
        self.turn_text: list[str] = []
        self.pending_text: list[str] = []
        self.cancel_requested = False
        self.lost = False
        # How far the journal went when the database last refused a write as one that is there already.
        self.refused_at: tuple[int, int] | None = None

    # --- the run's life ----------------------------------------------------------------------------------------------

    async def carry(self) -> None:
        """Step until there is nothing more to do here. Raises nothing but CancelledError."""
        request_id.set(self.run.request_id or self.run.id)
        try:
            await self._carry()
        except asyncio.CancelledError:
            if not self.cancel_requested or self.lost:
                raise
            await self._end(runs.finish_cancelled)

    async def _carry(self) -> None:
        while True:
            try:
                await self._steps()
                return
            except LeaseLost:
                if not await self._resume():
                    return
            except RunFailed as failure:
                await self._end(runs.fail, failure.code, failure.message)
                return
            except Exception as error:
                # A commit whose answer was lost is found again here, by what it wrote: then the journal is ahead.
                if isinstance(error, IntegrityError) and self.refused_at != (recorded := self._recorded()):
                    logger.warning("run %s is read anew after a write that was there already", self.run.id)
                    self.refused_at = recorded
                    if not await self._resume():
                        return
                    continue
                logger.exception("run %s failed for an unexpected reason", self.run.id)
                await self._end(runs.fail, "INTERNAL_ERROR", "Something went wrong on our side.")
                return

    def _recorded(self) -> tuple[int, int]:
        """How far the journal goes: turns, and calls that have an outcome."""
        return len(self.journal.turns), len(self.journal.calls) - len(self.journal.open_calls)

    async def _steps(self) -> None:
        if self.run.cancel_requested_at is not None:
            self.cancel_requested = True
            raise asyncio.CancelledError
        try:
            async with asyncio.timeout(max(0.0, self.journal.remaining_seconds())) as scope:
                model = self._model()
                while self.run.status == RunStatus.RUNNING:
                    if self.engine.draining:
                        await self.db(runs.hand_over, self.run)
                        return
                    if self.journal.open_calls:
                        await self.calls.go_on()
                    else:
                        await self._turn(model)
        except TimeoutError:
            if not scope.expired():
                raise
            raise RunFailed("RUN_TIMEOUT", "The run took longer than it may.") from None

    async def _end(self, transition: Callable[..., None], *args: Any) -> None:
        """Into a final state, with the text that was streamed but belongs to no recorded turn."""
        if self.run.status != RunStatus.RUNNING:
            return
        content = self._content() if self.turn_text else None
        try:
            await self.db(transition, self.run, *args, content=content, delta=self.take_pending())
        except LeaseLost:
            # Another's by now, or this one's with a row that is ahead of what is remembered of it.
            if await self._resume():
                await self._end(transition, *args)

    async def _resume(self) -> bool:
        """Read the journal anew; False if the run is another's by now."""
        if self.lost:
            return False
        journal = await self.db(journals.reload, self.run)
        if journal is None:
            logger.info("run %s is no longer this worker's", self.run.id)
            return False
        streamed = self.run.unrecorded_text or journal.run.unrecorded_text
        self.journal, self.run = journal, journal.run
        self.turn_text.clear()
        self.pending_text.clear()
        if streamed:
            await self.db(runs.reset_text, self.run, journal.text)
        return True

    async def db(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A database step of this run: never beside another one of its own."""
        async with self.lock:
            return await self.engine.db(step, *args, **kwargs)

    # --- turns -------------------------------------------------------------------------------------------------------

    def _model(self) -> AgentModel:
        model = catalogue.remembered().model(self.run.resolved_model or self.run.requested_model)
        if model is None:
            raise RunFailed("MODEL_ERROR", "The model is no longer offered.")
        return model

    async def _turn(self, model: AgentModel) -> None:
        if self.journal.asked:
            self.journal.asked, refused = False, self.journal.refused
        else:
            refused = await self.db(journals.refusal, self.run, len(self.journal.turns))
        if refused:
            raise RunFailed(*refused)
        crash_point("before_model")
        await self.confirm_lease()
        started_at = clock.now()
        calls: list[ToolCall] = []
        usage = Usage(0, 0)
        self.turn_text.clear()
        try:
            client, request = client_for(model.provider), self.journal.request(model.provider_model)
            if client.reads_files:
                request = await with_files(request, self.engine.tool_threads)
            with tracing.span("model", model=model.name, provider=model.provider):
                async for event in client.stream(request):
                    if isinstance(event, TextDelta):
                        self._stream(event.text)
                    elif isinstance(event, ToolCall):
                        calls.append(event)
                    else:
                        usage = event
        except ModelError as error:
            raise RunFailed(error.code, str(error)) from None
        except Unavailable:
            raise RunFailed("INTERNAL_ERROR", "The message's attachments could not be read.") from None
        crash_point("after_model")
        await self._record_turn(model, started_at, calls, usage)

    async def _record_turn(self, model: AgentModel, started_at: Any, calls: list[ToolCall], usage: Usage) -> None:
        # What a model says it used is input too.
        usage = Usage(min(usage.input_tokens, TOKENS_MAX), min(usage.output_tokens, TOKENS_MAX))
        cost_in = money.price(usage.input_tokens, model.price_in)
        cost_out = money.price(usage.output_tokens, model.price_out)
        turn = Turn(
            run=self.run,
            index=len(self.journal.turns) + 1,
            model=model.name,
            text="".join(self.turn_text),
            tool_calls=[{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls],
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cost=cost_in + cost_out,
            started_at=started_at,
            finished_at=clock.now(),
        )
        invocations = self.calls.invocations_of(turn.index, calls)
        crash_point("before_dispatch")
        async with self.lock:
            # The pending text is taken under the lock: what the flusher took before is written by now.
            dispatched = await self.engine.db(
                runs.record_turn,
                self.run,
                turn,
                invocations,
                content=self._content(),
                delta=self.take_pending(),
                price={
                    "model": model.name,
                    "inputTokens": usage.input_tokens,
                    "outputTokens": usage.output_tokens,
                    "in": model.price_in,
                    "out": model.price_out,
                },
                ready=self.calls.unasked(invocations),
            )
        self.journal.turns.append(turn)
        self.journal.calls.extend(invocations)
        self.turn_text.clear()
        await self.calls.execute(dispatched)

    # --- text --------------------------------------------------------------------------------------------------------

    def _stream(self, text: str) -> None:
        if not text:
            return
        if not self.turn_text and self.journal.text:
            self.pending_text.append("\n\n")  # as join_text parts one turn's text from the next
        self.turn_text.append(text)
        self.pending_text.append(text)
        self.engine.flusher.add(self)

    def _content(self) -> str:
        return runs.join_text([self.journal.text, "".join(self.turn_text)])

    def take_pending(self) -> str:
        text = "".join(self.pending_text)
        self.pending_text.clear()
        return text

    async def confirm_lease(self) -> None:
        """Before a step that is felt outside: a process that was suspended past its lease must not begin it."""
        if self.engine.lease_may_have_lapsed():
            await self.db(runs.confirm_lease, self.run)
