"""One claimed run in memory. It changes only by ``step``, ``reload`` and the flush of its text, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from django.conf import settings

from config.kernel import clock
from runs import catalogue, lifecycle
from runs.catalogue import version_of
from runs.engine import history
from runs.engine.history import History, Journal, read_journal
from runs.engine.process import Gathered, Process
from runs.engine.transcript import TurnPart, turn_parts
from runs.events import SEPARATOR
from runs.models import AgentVersion, InvocationStatus, ModelAttempt, Run, RunStatus, ToolInvocation
from runs.tools.base import CLIENT, ToolDefinition

P = ParamSpec("P")
T = TypeVar("T")

LEASE_WAIT_SECONDS = 0.05  # the pause between two checks whether the heartbeat has renewed the lease
DRAIN_LOOK_SECONDS = 0.5  # the pause between two checks whether the process drains
PAUSE_SECONDS = 1.0  # after an error; ``Process.db`` itself waits while the database is not available

logger = logging.getLogger(__name__)


class Interruption(enum.Enum):
    """Why a run's task was cancelled."""

    REQUESTED = "its user or staff asked for the run's end"
    BEHIND = "the database is ahead of the session, which must read the run again"
    LOST = "another worker owns the run"
    SHUT_DOWN = "this process ends"


class Claimed(NamedTuple):
    """A claimed run with all that its session begins with."""

    run: Run
    agent: AgentVersion | None
    history: History
    journal: Journal


async def claim(process: Process, run_id: str) -> Claimed | None:
    """None if the run may not be claimed. A claim waits for the user's other claims in all processes. So only a few at
    a time are made without knowing the user; for the others, a query finds the user first.
    """
    if not process.first_claims.locked():
        async with process.first_claims:
            return await process.db(claim_and_load, run_id, process.worker_id)
    user_id = await process.user_of(run_id)
    return None if user_id is None else await process.db_for(user_id, claim_and_load, run_id, process.worker_id)


def claim_and_load(run_id: str, worker_id: str) -> Claimed | None:
    run = lifecycle.claim(run_id, worker_id)
    # Nothing is recorded yet for a run that is claimed for the first time.
    return _load(run, read_journal(run) if run.lease_token > 1 else Journal()) if run else None


def _load(run: Run, recorded: Journal) -> Claimed:
    window = max((model.context_tokens for model in catalogue.models_of(run)), default=0)
    return Claimed(run, version_of(run.agent), history.load(run, window), recorded)


def reload(run: Run) -> Claimed | None:
    """The run as the database has it; None if this owner no longer has it."""
    owned = Run.objects.filter(pk=run.pk, lease_token=run.lease_token, worker_id=run.worker_id)
    current = owned.filter(status=RunStatus.RUNNING).first()
    return _load(current, read_journal(current)) if current else None


class Session:
    def __init__(self, process: Process, claimed: Claimed) -> None:
        self.process = process
        # The run's own steps, the results of its tool calls and the flush of its text take turns.
        self.lock = asyncio.Lock()
        self.interruption: Interruption | None = None
        # The number of requests to models, and what the open request has cost so far, if it is to be charged.
        self.requests = 0
        self.partial_charge: Callable[[], lifecycle.Charge | None] = lambda: None
        # By model: why credits or budget are not enough for the next turn.
        self.too_dear: dict[str, lifecycle.Refusal] = {}
        # The text of the turn that is being streamed, and the part of it that is not written to an event yet.
        self.turn_text: list[str] = []
        self.unwritten_text: list[str] = []
        self._take(claimed)
        # Open calls that may have had an effect outside: an earlier worker dispatched them, or this worker began them.
        self.uncertain = {call.id for call in self.journal.open_calls if call.status == InvocationStatus.DISPATCHING}

    def _take(self, claimed: Claimed) -> None:
        self.run, self.agent, self.history, self.journal = claimed
        self.output_schema: Mapping[str, Any] | None = self.run.output_schema
        if self.output_schema is None and self.agent is not None:
            self.output_schema = self.agent.output_schema
        self.client_tools: dict[str, ToolDefinition] = {}
        for tool in self.run.client_tools or ():
            name, description = tool["name"], tool["description"]
            self.client_tools[name] = ToolDefinition(name, name, description, CLIENT, tool["inputSchema"], price=0)
        self._parts: list[TurnPart] = []

    async def db(self, step: Callable[Concatenate[Run, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a database step that does not change this run: ``step(run, *args)``."""
        async with self.lock:
            return await self.process.db_for(self.run.user_id, step, self.run, *args, **kwargs)

    async def step(
        self, transition: Callable[..., lifecycle.Moved], *args: Any, stores_text: bool = False, **kwargs: Any
    ) -> Sequence[ToolInvocation]:
        """Make a transition of this run: ``transition(run, *args, **kwargs)``. It is repeated while the database is not
        available. Returns the calls that it changed. Raises LeaseLost if the row differs from what this session knows.
        ``stores_text``: the transition gets the present turn's text that was not streamed yet, as ``delta``.
        """
        async with self.lock:
            if stores_text:
                # Under the lock, so that text that the flusher has taken is written by now.
                kwargs["delta"] = self.take_unwritten()
            known = self.run
            try:
                return await self.process.db_for(known.user_id, self._move, transition, args, kwargs)
            except BaseException:
                # But not if the transition was made, and only the run's task was cancelled meanwhile.
                if stores_text and self.run is known:
                    self.unwritten_text.insert(0, kwargs["delta"])
                raise
            finally:
                self.process.credit_line.wake(self.run.user_id)  # it may have settled a hold

    def _move(
        self, transition: Callable[..., lifecycle.Moved], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[ToolInvocation]:
        """Runs on the database thread, so that the session gets the outcome even if its task is cancelled meanwhile."""
        moved = transition(self.run, *args, **kwargs)
        self.run = moved.run
        self.journal.take(moved)
        if moved.turn is not None:
            self.turn_text.clear()
            self.too_dear.clear()
        # During a transition no request is open, or the transition ends and settles the request.
        self.partial_charge = lambda: None
        return moved.calls

    async def reload(self) -> bool:
        """Read the run again; False if another worker has it by now."""
        if self.interruption not in (None, Interruption.REQUESTED):
            return False
        claimed = await self.db(reload)
        if claimed is None:
            return False
        is_new = claimed.run.cancel_requested_at is not None and self.run.cancel_requested_at is None
        if is_new and claimed.run.last_stream_index == self.run.last_stream_index:
            self.run = claimed.run  # the cancel settles the open request
            return True
        self._take(claimed)
        self.turn_text.clear()
        self.unwritten_text.clear()
        if claimed.run.unrecorded_text or not self.journal.open_calls:
            await self.end_request()
        self.partial_charge = lambda: None
        return True

    async def end_request(self, attempt: ModelAttempt | None = None) -> None:
        """A request ended without an answer and another one follows: the text that was streamed is void."""
        partial_charge = self.partial_charge()
        async with self.lock:  # text that the flusher took is written or put back by now
            self.turn_text.clear()
            self.unwritten_text.clear()
        await self.step(lifecycle.end_request, attempt, self.journal.text, partial_charge)

    async def confirm_lease(self) -> None:
        """Wait until the heartbeat has renewed the lease. Called before each step with an effect outside: a process
        that was suspended past its lease must not begin one. If the lease was lost, the heartbeat cancels this task.
        """
        while clock.steady() >= self.process.lease_until:  # noqa: ASYNC110
            await asyncio.sleep(LEASE_WAIT_SECONDS)  # the heartbeat is a thread

    def add_text(self, text: str) -> None:
        """Add text to the present turn; the flusher writes it soon."""
        if not text:
            return
        if not self.turn_text and self.journal.text:
            self.unwritten_text.append(SEPARATOR)
        if not self.turn_text:
            self.process.begun.add(self.run.id, self)
        self.turn_text.append(text)
        self.unwritten_text.append(text)
        self.process.unwritten.add(self.run.id, self)

    def take_unwritten(self) -> str:
        text = "".join(self.unwritten_text)
        self.unwritten_text.clear()
        return text

    def put_back(self, text: str) -> None:
        self.unwritten_text.insert(0, text)
        self.process.unwritten.add(self.run.id, self)

    def parts(self) -> list[TurnPart]:
        """The run's own turns for the transcript. All their calls must have ended."""
        known = len(self._parts)
        if known < len(self.journal.turns):
            calls = [call for call in self.journal.calls if call.turn_index > known]
            self._parts += turn_parts(self.journal.turns[known:], calls)
        return self._parts

    def counted(self) -> dict[str, int]:
        """Counts of input tokens, by request: for this run, and for the last requests of the chat's earlier runs."""
        turns = filter(history.is_counted, (*self.history.counted, *self.journal.turns))
        return {turn.request_digest: turn.input_tokens for turn in turns if turn.request_digest}

    @property
    def instructions(self) -> str:
        """The system prompt: the same text at every turn."""
        given = settings.MODEL_SYSTEM_PROMPT if self.agent is None else self.agent.instructions
        return "\n\n".join(filter(None, (given, self.run.instructions)))

    def tools(self) -> dict[str, ToolDefinition]:
        """By name: the catalogue's tools that the run may use, and the tools of the caller's app."""
        tools, allowed = catalogue.remembered().tools, self.run.tools
        return {name: tools[name] for name in tools if allowed is None or name in allowed} | self.client_tools

    async def learn_tools(self, names: Iterable[str]) -> None:
        """Look up the named tools that the run may use and that this process does not know: their rows may be new."""
        allowed, known = self.run.tools, self.tools()
        if unknown := {name for name in names if name not in known and (allowed is None or name in allowed)}:
            await self.process.db_for(self.run.user_id, catalogue.learn_tools, unknown)

    async def wait_for_credits(self, least: int) -> None:
        """Wait, without a thread or connection, while other steps of the user hold credits that this step needs."""
        run, waits = self.run, partial(self.db, lifecycle.wait_for_credits, least)
        await self.process.credit_line.wait(run.user_id, (run.created_at, run.id), waits)

    async def wait_for_retry(self, compaction: int = 0) -> bool:
        """Wait, without a thread, connection or place, until the next request is due. False if the process drains."""
        failed = self.journal.failed(compaction)
        due = failed[-1].next_at if failed else None
        while due is not None and (left := (due - clock.now()).total_seconds()) > 0:
            if self.process.draining:
                return False
            await asyncio.sleep(min(left, DRAIN_LOOK_SECONDS))
        return True

    def remaining_seconds(self) -> float:
        """The running time that the run has left, in seconds."""
        stretch = clock.now() - self.run.running_since if self.run.running_since else timedelta()
        return settings.RUN_TIMEOUT_SECONDS - self.run.ran_ms / 1000 - stretch.total_seconds()


async def flush_forever(process: Process, gathered: Gathered, interrupt: Callable[[Session], None]) -> None:
    """Write the ``gathered`` text. ``interrupt`` is called for each session whose run has changed in the database."""
    while True:
        await gathered.added.wait()
        await asyncio.sleep(gathered.seconds)
        try:
            await flush(process, gathered.take(), interrupt)
        except Exception:
            logger.exception("streamed text could not be written; the next flush tries again")
            await asyncio.sleep(PAUSE_SECONDS)


async def flush(process: Process, waiting: list[Session], interrupt: Callable[[Session], None]) -> None:
    """Write the text of these sessions. While a flush is slow, more text gathers for the next one."""
    async with contextlib.AsyncExitStack() as locks:
        taken: list[tuple[Session, str]] = []
        # In a fixed order, because the other flush may lock the same sessions.
        for session in sorted(waiting, key=lambda session: session.run.id):
            if session.lock.locked():
                # The step that holds the lock may record the text; if it does not, the next flush writes it.
                process.unwritten.add(session.run.id, session)
            elif session.unwritten_text:
                await locks.enter_async_context(session.lock)
                if text := session.take_unwritten():
                    taken.append((session, text))
        if not taken:
            return
        try:
            written = await process.db(lifecycle.append_text, [(session.run, text) for session, text in taken])
        except BaseException:
            for session, text in taken:
                session.put_back(text)
            raise
        for session, text in taken:
            if session.run.id not in written:
                interrupt(session)
            elif written[session.run.id] is session.run:  # its row is locked; the next flush tries again
                session.put_back(text)
            else:
                session.run = written[session.run.id]
