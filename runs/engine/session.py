"""One claimed run in memory, and what the runs of one process share.

A session's run and journal change only through ``move``, ``record`` and ``reload``, one at a time.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from django.conf import settings

from config.database.retry import persist
from config.kernel import clock
from runs import catalogue, lifecycle
from runs.engine import context, journal
from runs.engine.journal import Journal
from runs.models import InvocationStatus, Run, RunStatus, ToolInvocation
from runs.tools.base import ToolDefinition
from runs.tools.places import Places, Threads

P = ParamSpec("P")
T = TypeVar("T")

# Between two looks whether the heartbeat has renewed the lease.
LEASE_WAIT_SECONDS = 0.05


class Interruption(enum.Enum):
    """Why a run's task was cancelled."""

    REQUESTED = "its user or staff asked for the run's end"
    BEHIND = "the database is ahead of the session, which must read the run again"
    LOST = "another worker owns the run"
    SHUT_DOWN = "this process ends"


@dataclass
class Process:
    """What the runs of one process share. Changed on the event loop, except by the heartbeat, which owns the lease."""

    db_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(settings.RUN_WORKER_DB_THREADS, "run-db")
    )
    tool_places: Places = field(default_factory=lambda: Places(settings.TOOL_CALLS_PER_USER))
    tool_threads: Threads = field(
        default_factory=lambda: Threads(settings.RUN_WORKER_TOOL_THREADS, settings.TOOL_THREADS_PER_USER, "run-tool")
    )
    file_threads: Threads = field(
        default_factory=lambda: Threads(settings.RUN_WORKER_FILE_THREADS, settings.FILE_THREADS_PER_USER, "run-file")
    )
    attachment_bytes: Places = field(default_factory=lambda: Places(settings.ATTACHMENT_BYTES_PER_USER))
    worker_id: str = ""
    # Until when, by ``clock.steady``, the lease certainly holds.
    lease_until: float = 0.0
    draining: bool = False
    # The sessions with streamed text that is not written yet.
    unwritten: dict[str, Session] = field(default_factory=dict)
    text_was_added: asyncio.Event = field(default_factory=asyncio.Event)
    # Each user's share of the database threads, while one of the user's steps needs it.
    shares: WeakValueDictionary[int, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    # Claims of runs whose users are not known yet.
    first_claims: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 4))
    )

    async def claim(self, run_id: str) -> Claimed | None:
        """None if the run may not be claimed. A claim waits for the user's other claims in all processes, so only a few
        are made before their user is known, which takes a query.
        """
        if not self.first_claims.locked():
            async with self.first_claims:
                return await self.db(claim_and_load, run_id, self.worker_id)
        user_id = await self.db(user_of, run_id)
        return None if user_id is None else await self.db_for(user_id, claim_and_load, run_id, self.worker_id)

    async def db(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A step of the process itself."""
        return await persist(self.db_threads, step, *args, **kwargs)

    async def db_for(self, user_id: int, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A step of one user's run. Steps above the user's share wait in order, so that a user whose rows are locked
        does not occupy all threads.
        """
        share = self.shares.get(user_id)
        if share is None:
            share = self.shares[user_id] = asyncio.Semaphore(settings.RUN_WORKER_DB_THREADS_PER_USER)
        async with share:
            return await persist(self.db_threads, step, *args, **kwargs)


@dataclass(frozen=True)
class Claimed:
    """A run with all that its session begins with."""

    run: Run
    history: context.History
    journal: Journal
    # Whether the first turn was already checked, and what ``context.refusal`` said.
    checked: bool = False
    refusal: tuple[str, str] | None = None


def user_of(run_id: str) -> int | None:
    """The id of the run's user; None if there is no such run."""
    return Run.objects.filter(pk=run_id).values_list("user_id", flat=True).first()


def claim_and_load(run_id: str, worker_id: str) -> Claimed | None:
    """None if the run may not be claimed."""
    run = lifecycle.claim(run_id, worker_id)
    if run is None:
        return None
    if run.lease_token > 1:
        return Claimed(run, context.history(run), journal.load(run))
    # Nothing can be recorded of a run that is claimed for the first time.
    refusal = context.refusal(run, 0, available=vars(run)["available"])
    return Claimed(run, context.history(run), Journal(), checked=True, refusal=refusal)


def reload(run: Run) -> Claimed | None:
    """The run as the database has it; None if it is no longer this owner's."""
    current = Run.objects.filter(
        pk=run.pk, status=RunStatus.RUNNING, lease_token=run.lease_token, worker_id=run.worker_id
    ).first()
    return Claimed(current, context.history(current), journal.load(current)) if current else None


class Session:
    def __init__(self, process: Process, claimed: Claimed) -> None:
        self.process = process
        # The run's own steps, the results of its tool calls and the flush of its text take turns.
        self.lock = asyncio.Lock()
        self.interruption: Interruption | None = None
        # The text of the turn that is being streamed, and the part of it that no event holds yet.
        self.turn_text: list[str] = []
        self.unwritten_text: list[str] = []
        self._take(claimed)
        # Open calls that may have had an effect outside: dispatched by an earlier worker, or begun here.
        self.uncertain = {call.id for call in self.journal.open_calls if call.status == InvocationStatus.DISPATCHING}

    def _take(self, claimed: Claimed) -> None:
        self.run, self.history, self.journal = claimed.run, claimed.history, claimed.journal
        self.checked, self.refusal = claimed.checked, claimed.refusal

    async def db(self, step: Callable[Concatenate[Run, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A database step of this run that changes nothing: ``step(run, *args)``."""
        async with self.lock:
            return await self.process.db_for(self.run.user_id, step, self.run, *args, **kwargs)

    async def move(
        self, transition: Callable[Concatenate[Run, P], lifecycle.Moved], *args: P.args, **kwargs: P.kwargs
    ) -> Sequence[ToolInvocation]:
        """Make a transition of this run: ``transition(run, *args)``. Returns the calls that it changed."""
        async with self.lock:
            return await self.process.db_for(self.run.user_id, self._move, transition, args, kwargs)

    async def record(
        self, transition: Callable[..., lifecycle.Moved], *args: Any, **kwargs: Any
    ) -> Sequence[ToolInvocation]:
        """``move``, for a transition that also stores the text that was streamed."""
        async with self.lock:
            # Under the lock, so that the text which the flusher took before is written by now.
            text = {"content": self.content(), "delta": self.take_unwritten()}
            return await self.process.db_for(self.run.user_id, self._move, transition, args, kwargs | text)

    def _move(
        self, transition: Callable[..., lifecycle.Moved], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[ToolInvocation]:
        """On the database thread, so that the session knows the outcome even if its task is cancelled meanwhile."""
        moved = transition(self.run, *args, **kwargs)
        self.run = moved.run
        self.journal.take(moved.calls)
        return moved.calls

    async def record_outcome(
        self, transition: Callable[..., lifecycle.Moved], call: ToolInvocation, *args: Any, **kwargs: Any
    ) -> None:
        """``move``, for the outcome of a call that was made. It is recorded even if the answer to the commit of another
        call's outcome was lost: the session is then behind the database, and reads the run again.
        """
        while True:
            try:
                await self.move(transition, call, *args, **kwargs)
                return
            except lifecycle.LeaseLost:
                if not await self.reload():
                    raise
            if all(call.id != still_open.id for still_open in self.journal.open_calls):
                return  # its own commit's answer was lost

    async def reload(self) -> bool:
        """Read the run again; False if it is another worker's by now."""
        if self.interruption not in (None, Interruption.REQUESTED):
            return False
        claimed = await self.db(reload)
        if claimed is None:
            return False
        streamed = self.run.unrecorded_text or claimed.run.unrecorded_text
        self._take(claimed)
        self.turn_text.clear()
        self.unwritten_text.clear()
        if streamed:
            await self.move(lifecycle.reset_text, self.journal.text)
        return True

    async def confirm_lease(self) -> None:
        """Before a step with an effect outside, which a process that was suspended past its lease must not begin.

        Waits until the heartbeat has renewed the lease. If the lease was lost, the heartbeat cancels this task.
        """
        while clock.steady() >= self.process.lease_until:  # noqa: ASYNC110
            await asyncio.sleep(LEASE_WAIT_SECONDS)  # the heartbeat is a thread

    def add_text(self, text: str) -> None:
        """Text of the present turn, which the flusher writes soon."""
        if not text:
            return
        if not self.turn_text and self.journal.text:
            self.unwritten_text.append("\n\n")  # as join_text separates the texts of turns
        self.turn_text.append(text)
        self.unwritten_text.append(text)
        self.wait_for_flush()

    def wait_for_flush(self) -> None:
        self.process.unwritten[self.run.id] = self
        self.process.text_was_added.set()

    def content(self) -> str:
        """The message with the text of the present turn."""
        return lifecycle.join_text([self.journal.text, "".join(self.turn_text)])

    def take_unwritten(self) -> str:
        text = "".join(self.unwritten_text)
        self.unwritten_text.clear()
        return text

    def tools(self) -> dict[str, ToolDefinition]:
        return catalogue.remembered().tools_for(self.run.tools)

    async def learn_tools(self, names: Iterable[str]) -> None:
        """Look up those of the tools that the run may use and this process does not know. Their rows may be new."""
        allowed, known = self.run.tools, self.tools()
        if unknown := {name for name in names if name not in known and (allowed is None or name in allowed)}:
            await self.process.db_for(self.run.user_id, catalogue.learn_tools, unknown)

    def remaining_seconds(self) -> float:
        """The running time that the run has left."""
        stretch = clock.now() - self.run.running_since if self.run.running_since else timedelta()
        return settings.RUN_TIMEOUT_SECONDS - self.run.ran_ms / 1000 - stretch.total_seconds()
