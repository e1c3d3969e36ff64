"""One claimed run in memory, and what the runs of one process share.

A session's run and journal change only through ``step`` and ``reload``, one at a time.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from django.conf import settings

from config.database.retry import persist
from config.kernel import clock
from config.limits.share import Share, Threads
from runs import catalogue, lifecycle
from runs.catalogue import version_of
from runs.engine import history
from runs.engine.credit_line import CreditLine
from runs.engine.history import History, Journal, read_journal
from runs.engine.model_places import ModelPlaces
from runs.engine.transcript import TurnPart, turn_parts
from runs.models import AgentVersion, InvocationStatus, ModelAttempt, Run, RunStatus, ToolInvocation
from runs.tools.base import CLIENT, ToolDefinition

# Threads of a worker process that compute for tools; calls to servers need none.
RUN_WORKER_TOOL_THREADS = 4
# How many of `RUN_WORKER_TOOL_THREADS` one user can occupy.
TOOL_THREADS_PER_USER = 1
# Threads of a worker process that read attachments and store the files of tools.
RUN_WORKER_FILE_THREADS = 16
# How many of `RUN_WORKER_FILE_THREADS` one user can occupy.
FILE_THREADS_PER_USER = 2
# Bytes of one user's files in requests to models that a worker process holds at a time; further turns wait.
ATTACHMENT_BYTES_PER_USER = 128 * 1024 * 1024

P = ParamSpec("P")
T = TypeVar("T")

# Between two looks whether the heartbeat has renewed the lease.
LEASE_WAIT_SECONDS = 0.05
# Between two looks whether the process drains.
DRAIN_LOOK_SECONDS = 0.5


class Interruption(enum.Enum):
    """Why a run's task was cancelled."""

    REQUESTED = "its user or staff asked for the run's end"
    BEHIND = "the database is ahead of the session, which must read the run again"
    LOST = "another worker owns the run"
    SHUT_DOWN = "this process ends"


class Streamed(enum.Enum):
    """What becomes of the text that was streamed of the present turn."""

    KEPT = "it stays as it is"
    RECORDED = "the transition stores it"
    VOID = "the request that sent it has failed"


class Gathered:
    """Sessions whose text a flush writes next. ``added`` is set while there are any."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.added = asyncio.Event()

    def add(self, session: Session) -> None:
        self.sessions[session.run.id] = session
        self.added.set()

    def take(self) -> list[Session]:
        taken, self.sessions = list(self.sessions.values()), {}
        self.added.clear()
        return taken

    def remove(self, run_id: str) -> None:
        self.sessions.pop(run_id, None)


class Process:
    """What the runs of one process share. Changed on the event loop, except by the heartbeat, which owns the lease."""

    def __init__(self) -> None:
        self.db_threads = ThreadPoolExecutor(settings.RUN_WORKER_DB_THREADS, "run-db")
        self.tool_places = Share(settings.TOOL_CALLS_PER_USER)
        self.tool_threads = Threads(RUN_WORKER_TOOL_THREADS, TOOL_THREADS_PER_USER, "run-tool")
        self.file_threads = Threads(RUN_WORKER_FILE_THREADS, FILE_THREADS_PER_USER, "run-file")
        self.attachment_bytes = Share(ATTACHMENT_BYTES_PER_USER)
        self.worker_id = ""
        # Until when, by ``clock.steady``, the lease certainly holds.
        self.lease_until = 0.0
        self.draining = False
        self.model_places = ModelPlaces(leaving=lambda: self.draining)
        self.credit_line = CreditLine(leaving=lambda: self.draining)
        # The sessions with streamed text that is not written yet, and those of them whose turn has shown no text yet.
        self.unwritten, self.begun = Gathered(), Gathered()
        # Each user's share of the database threads, while one of the user's steps needs it.
        self.shares: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        # Claims of runs whose users are not known yet.
        self.first_claims = asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 4))
        # The runs whose users are wanted.
        self.wanted: dict[str, asyncio.Future[int | None]] = {}
        self.look_up = asyncio.Lock()

    async def claim(self, run_id: str) -> Claimed | None:
        """None if the run may not be claimed. A claim waits for the user's other claims in all processes, so only a few
        are made before their user is known, which takes a query.
        """
        if not self.first_claims.locked():
            async with self.first_claims:
                return await self.db(claim_and_load, run_id, self.worker_id)
        user_id = await self._user_of(run_id)
        return None if user_id is None else await self.db_for(user_id, claim_and_load, run_id, self.worker_id)

    async def _user_of(self, run_id: str) -> int | None:
        """The id of the run's user; None if there is no such run. All who wait share the next query."""
        answer = self.wanted.setdefault(run_id, asyncio.get_running_loop().create_future())
        async with self.look_up:
            if not answer.done():
                asked = list(self.wanted)
                found = await self.db(users_of, asked)
                for other in asked:
                    self.wanted.pop(other).set_result(found.get(other))
        return answer.result()

    async def db(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A step of the process itself."""
        return await persist(self.db_threads, step, *args, **kwargs)

    async def db_for(self, user_id: int, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A step of one user's run. Steps above the user's share wait in order, so that a user whose rows are locked
        does not occupy all threads.
        """
        share = self.shares.get(user_id)
        if share is None:
            share = self.shares[user_id] = asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 2))
        async with share:
            return await self.db(step, *args, **kwargs)


@dataclass(frozen=True)
class Claimed:
    """A run with all that its session begins with."""

    run: Run
    agent: AgentVersion | None
    history: History
    journal: Journal


def users_of(run_ids: Sequence[str]) -> dict[str, int]:
    """The ids of the runs' users, by run."""
    return dict(Run.objects.filter(pk__in=run_ids).values_list("pk", "user_id"))


def claim_and_load(run_id: str, worker_id: str) -> Claimed | None:
    """None if the run may not be claimed."""
    run = lifecycle.claim(run_id, worker_id)
    # Nothing can be recorded of a run that is claimed for the first time.
    return _load(run, read_journal(run) if run.lease_token > 1 else Journal()) if run else None


def _load(run: Run, recorded: Journal) -> Claimed:
    window = max((model.context_tokens for model in catalogue.models_of(run)), default=0)
    return Claimed(run, version_of(run.agent), history.load(run, window), recorded)


def reload(run: Run) -> Claimed | None:
    """The run as the database has it; None if it is no longer this owner's."""
    current = Run.objects.filter(
        pk=run.pk, status=RunStatus.RUNNING, lease_token=run.lease_token, worker_id=run.worker_id
    ).first()
    return _load(current, read_journal(current)) if current else None


def _client_tool(given: Mapping[str, Any]) -> ToolDefinition:
    name, description = given["name"], given["description"]
    return ToolDefinition(name, name, description, CLIENT, given["inputSchema"], price=0)


class Session:
    def __init__(self, process: Process, claimed: Claimed) -> None:
        self.process = process
        # The run's own steps, the results of its tool calls and the flush of its text take turns.
        self.lock = asyncio.Lock()
        self.interruption: Interruption | None = None
        # The number of requests to models, and what the one that is under way cost so far, if it is to be charged.
        self.requests = 0
        self.partial_charge: Callable[[], lifecycle.Charge | None] = lambda: None
        # Why credits or budget do not reach for the next turn of these models.
        self.too_dear: dict[str, lifecycle.Refusal] = {}
        # The text of the turn that is being streamed, and the part of it that no event holds yet.
        self.turn_text: list[str] = []
        self.unwritten_text: list[str] = []
        self._take(claimed)
        # Open calls that may have had an effect outside: dispatched by an earlier worker, or begun here.
        self.uncertain = {call.id for call in self.journal.open_calls if call.status == InvocationStatus.DISPATCHING}

    def _take(self, claimed: Claimed) -> None:
        self.run, self.history, self.journal = claimed.run, claimed.history, claimed.journal
        self.agent = claimed.agent
        given = self.run.output_schema
        self.output_schema: Mapping[str, Any] | None = (
            self.agent.output_schema if given is None and self.agent is not None else given
        )
        self.client_tools = {tool["name"]: _client_tool(tool) for tool in self.run.client_tools or ()}
        self._parts: list[TurnPart] = []

    async def db(self, step: Callable[Concatenate[Run, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A database step of this run that changes nothing: ``step(run, *args)``."""
        async with self.lock:
            return await self.process.db_for(self.run.user_id, step, self.run, *args, **kwargs)

    async def step(
        self, transition: Callable[..., lifecycle.Moved], *args: Any, streamed: Streamed = Streamed.KEPT, **kwargs: Any
    ) -> Sequence[ToolInvocation]:
        """Make a transition of this run: ``transition(run, *args, **kwargs)``. It is repeated while the database is not
        available. Returns the calls that it changed. Raises LeaseLost if the database is ahead of this session.
        """
        async with self.lock:
            # Under the lock, so that the text which the flusher took before is written by now.
            delta = self.take_unwritten() if streamed is not Streamed.KEPT else ""
            if streamed is Streamed.RECORDED:
                kwargs |= {"content": self.content(), "delta": delta}
            elif streamed is Streamed.VOID:
                self.turn_text.clear()
            try:
                return await self.process.db_for(self.run.user_id, self._move, transition, args, kwargs)
            except lifecycle.LeaseLost:
                if streamed is Streamed.RECORDED:
                    self.unwritten_text.insert(0, delta)
                raise
            finally:
                self.process.credit_line.wake(self.run.user_id)  # it may have settled a hold

    def _move(
        self, transition: Callable[..., lifecycle.Moved], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[ToolInvocation]:
        """On the database thread, so that the session knows the outcome even if its task is cancelled meanwhile."""
        moved = transition(self.run, *args, **kwargs)
        self.run = moved.run
        self.journal.take(moved)
        if moved.turn is not None:
            self.turn_text.clear()
            self.too_dear.clear()
        # A transition is made when no request is under way, or ends and settles it.
        self.partial_charge = lambda: None
        return moved.calls

    async def reload(self) -> bool:
        """Read the run again; False if it is another worker's by now."""
        if self.interruption not in (None, Interruption.REQUESTED):
            return False
        claimed = await self.db(reload)
        if claimed is None:
            return False
        is_new = claimed.run.cancel_requested_at is not None and self.run.cancel_requested_at is None
        if is_new and claimed.run.last_stream_index == self.run.last_stream_index:
            self.run = claimed.run  # the cancel settles what is under way
            return True
        self._take(claimed)
        self.turn_text.clear()
        self.unwritten_text.clear()
        if claimed.run.unrecorded_text or not self.journal.open_calls:
            await self.end_request()
        self.partial_charge = lambda: None
        return True

    async def end_request(self, attempt: ModelAttempt | None = None) -> None:
        """A request ended without an answer, and another one follows: what was streamed of it is void."""
        args = attempt, self.journal.text, self.partial_charge()
        await self.step(lifecycle.end_request, *args, streamed=Streamed.VOID)

    async def confirm_lease(self) -> None:
        """Before a step with an effect outside, which a process that was suspended past its lease must not begin: waits
        until the heartbeat has renewed the lease. If the lease was lost, the heartbeat cancels this task.
        """
        while clock.steady() >= self.process.lease_until:  # noqa: ASYNC110
            await asyncio.sleep(LEASE_WAIT_SECONDS)  # the heartbeat is a thread

    def add_text(self, text: str) -> None:
        """Text of the present turn, which the flusher writes soon."""
        if not text:
            return
        if not self.turn_text and self.journal.text:
            self.unwritten_text.append("\n\n")  # as join_text separates the texts of turns
        if not self.turn_text:
            self.process.begun.add(self)
        self.turn_text.append(text)
        self.unwritten_text.append(text)
        self.process.unwritten.add(self)

    def content(self) -> str:
        """The message with the text of the present turn."""
        return lifecycle.join_text([self.journal.text, "".join(self.turn_text)])

    def take_unwritten(self) -> str:
        text = "".join(self.unwritten_text)
        self.unwritten_text.clear()
        return text

    def put_back(self, text: str) -> None:
        """What was taken and not written."""
        self.unwritten_text.insert(0, text)
        self.process.unwritten.add(self)

    def parts(self) -> list[TurnPart]:
        """The run's own turns for the transcript. All their calls have ended."""
        known = len(self._parts)
        if known < len(self.journal.turns):
            calls = [call for call in self.journal.calls if call.turn_index > known]
            self._parts += turn_parts(self.journal.turns[known:], calls)
        return self._parts

    def counted(self) -> dict[str, int]:
        """What providers counted of requests of this run, and of the last ones of the chat's earlier runs."""
        own = filter(None, map(history.report_of, self.journal.turns))
        return {report.digest: report.tokens for report in (*self.history.reports, *own) if report.digest}

    @property
    def requested_model(self) -> str | None:
        return catalogue.requested_model(self.run, self.agent)

    @property
    def instructions(self) -> str:
        """The system prompt: the same text at every turn."""
        given = settings.MODEL_SYSTEM_PROMPT if self.agent is None else self.agent.instructions
        return "\n\n".join(filter(None, (given, self.run.instructions))) if self.run.instructions else given

    def tools(self) -> dict[str, ToolDefinition]:
        """Those of the catalogue that the run may use, and those of the caller's app."""
        return {**catalogue.remembered().tools_for(self.run.tools), **self.client_tools}

    async def learn_tools(self, names: Iterable[str]) -> None:
        """Look up those of the tools that the run may use and this process does not know. Their rows may be new."""
        allowed, known = self.run.tools, self.tools()
        if unknown := {name for name in names if name not in known and (allowed is None or name in allowed)}:
            await self.process.db_for(self.run.user_id, catalogue.learn_tools, unknown)

    async def wait_for_credits(self, least: int) -> None:
        """Wait while other steps of the user hold what this step needs at least, without a thread, a connection or a
        place. It ends too if the process drains, or if nothing is left to wait for.
        """
        run, waits = self.run, partial(self.db, lifecycle.wait_for_credits, least)
        await self.process.credit_line.wait(run.user_id, (run.created_at, run.id), waits)

    async def wait_until(self, due: datetime | None) -> bool:
        """Wait until the next request to a model is due, without a thread, a connection or a place at the provider.
        False if the process drains, so that the run is handed over.
        """
        while due is not None and (left := (due - clock.now()).total_seconds()) > 0:
            if self.process.draining:
                return False
            await asyncio.sleep(min(left, DRAIN_LOOK_SECONDS))
        return True

    def remaining_seconds(self) -> float:
        """The running time that the run has left."""
        stretch = clock.now() - self.run.running_since if self.run.running_since else timedelta()
        return settings.RUN_TIMEOUT_SECONDS - self.run.ran_ms / 1000 - stretch.total_seconds()
