"""What the runs of one process share: threads, places, the lease, and lines in which they wait for each other."""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from django.conf import settings

from config.database.retry import CONNECTION_ERRORS, attempt, outage, persist
from config.limits.share import Share, Threads
from runs import catalogue, metrics
from runs.catalogue.definitions import Server
from runs.llm import limits
from runs.models import Run, ToolInvocation
from runs.tools.base import ToolContext

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Threads that compute for tools, and how many of them one user can occupy; calls to tools' servers need no thread.
RUN_WORKER_TOOL_THREADS = 4
TOOL_THREADS_PER_USER = 1
# Threads that read attachments and store the files of tools.
RUN_WORKER_FILE_THREADS = 16
FILE_THREADS_PER_USER = 2
# Bytes of one user's files that the requests of a worker process hold at a time; further turns wait.
ATTACHMENT_BYTES_PER_USER = 128 * 1024 * 1024
STREAM_FLUSH_SECONDS = 0.05  # between two writes of streamed text; the first text of a turn does not wait for it
FIRST_TEXT_SECONDS = 0.01  # first texts within this time are written together; short answers are often complete by then
# The pause between two looks for credits, which grows: another process may have settled a hold, or staff granted some.
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.05, 1.0

# Of the places at providers: changes within GATHER_SECONDS are reported together; PAUSE_SECONDS follow an error.
RENEWALS_PER_LEASE = 5
GATHER_SECONDS = 0.005
PAUSE_SECONDS = 1.0

Age = tuple[datetime, str]  # the run's time of creation and its id


async def wait_within(seconds: float, event: asyncio.Event) -> None:
    """Wait for the event, at most this time. ``asyncio.wait_for`` of Python 3.11 can lose a cancel."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class CreditLine:
    """The steps of a process that wait for credits which other steps of the same user hold. Of each user, only the step
    of the oldest run looks for them; ``lifecycle.wait_for_credits`` keeps the order between processes.
    """

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        # By user: the age of each waiting step's run, and the event that wakes the step.
        self._lines: dict[int, list[tuple[Age, asyncio.Event]]] = {}

    async def wait(self, user_id: int, age: Age, waits: Callable[[], Awaitable[bool]]) -> None:
        """Wait while ``waits`` returns true, or until the process drains. ``age`` is that of the step's run."""
        place = age, asyncio.Event()
        line = self._lines.setdefault(user_id, [])
        insort(line, place, key=lambda other: other[0])
        pause = LOOK_SECONDS
        try:
            while not self.leaving():
                place[1].clear()
                if line[0] is place and not await waits():
                    return
                await wait_within(pause, place[1])
                pause = min(2 * pause, LOOK_SECONDS_MAX)
        finally:
            line.remove(place)
            if not line:
                del self._lines[user_id]
            self.wake(user_id)

    def wake(self, user_id: int) -> None:
        """Wake the user's first step: credits may be free, or this step has just become the first."""
        if line := self._lines.get(user_id):
            line[0][1].set()


class Gathered(dict[str, Any]):
    """The sessions, by run, whose text is written together: ``seconds`` after the first one was ``added``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.added = asyncio.Event()

    def add(self, run_id: str, session: Any) -> None:
        self[run_id] = session
        self.added.set()

    def take(self) -> list[Any]:
        taken = list(self.values())
        self.clear()
        self.added.clear()
        return taken


@dataclass(slots=True)
class _Provider:
    server: Server
    working: int = 0
    # The futures of each user's waiting requests, in order. The result says whether the request may begin.
    lines: dict[int, list[asyncio.Future[bool]]] = field(default_factory=dict)
    # The number of places that was last reported, and until when it need not be renewed (``time.monotonic``).
    said: int = 0
    renew_at: float = 0.0

    @property
    def waiting(self) -> int:
        return sum(map(len, list(self.lines.values())))  # metrics are read on other threads


class ModelPlaces:
    """The requests of a process to models: those that are being made, and those that wait for a place at a provider
    with limits. One thread asks for the places of all, and renews those that the process holds.
    """

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        self.id = secrets.token_hex(8)
        self.providers: dict[str, _Provider] = {}
        # A thread of its own, because all processes wait for the provider's row; steps of runs must not wait with it.
        self.thread = ThreadPoolExecutor(1, "run-places")
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, server: Server, user_id: int) -> AsyncIterator[bool]:
        """Hold a place for one request. Yields False, without one, if the process drains or the provider is gone."""
        provider = self.providers.get(server.name)
        if provider is None:
            provider = self.providers[server.name] = _Provider(server)
            metrics.model_requests_open.labels(server.name, "working").set_function(lambda: provider.working)
            metrics.model_requests_open.labels(server.name, "waiting").set_function(lambda: provider.waiting)
        provider.server = server
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line = provider.lines.setdefault(user_id, [])
        line.append(turn)
        if server.is_limited:
            self._changed.set()
        else:
            self._answer(provider, {user_id: None})
        try:
            yield await turn
        finally:
            if turn in line:  # cancelled during the wait
                line.remove(turn)
            elif not turn.cancelled() and turn.result():
                provider.working -= 1
            self._changed.set()

    async def run(self) -> None:
        while True:
            waits = any(provider.waiting for provider in self.providers.values())
            lease = limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
            pause = min(limits.MODEL_PLACES_POLL_SECONDS, lease) if waits else lease
            await wait_within(pause * random.uniform(0.5, 1.0), self._changed)  # noqa: S311
            self._changed.clear()
            if not await self.ask():
                await asyncio.sleep(PAUSE_SECONDS)
            await asyncio.sleep(GATHER_SECONDS)

    async def ask(self) -> bool:
        """Ask for places at all providers, and give free ones back. False if the database could not be asked."""
        try:
            for provider in list(self.providers.values()):
                await self._ask(provider)
        except CONNECTION_ERRORS as error:
            outage.failed(error)
            return False
        except Exception:
            logger.exception("places at providers could not be asked for; trying again")
            return False
        return True

    async def _ask(self, provider: _Provider) -> None:
        servers = {model.server.name: model.server for model in catalogue.remembered().models.values()}
        server = servers.get(provider.server.name, provider.server)
        if self.leaving() or server.name not in servers:
            self._answer(provider, dict.fromkeys(provider.lines), may_begin=False)
        provider.lines = {user_id: line for user_id, line in provider.lines.items() if line}
        if not server.is_limited:
            self._answer(provider, dict.fromkeys(provider.lines))
            return
        working, waiting = provider.working, {str(user_id): len(line) for user_id, line in provider.lines.items()}
        begun = time.monotonic()
        renews = working and begun >= provider.renew_at
        if not (waiting or renews or working != provider.said):
            return
        loop = asyncio.get_running_loop()
        granted = await loop.run_in_executor(self.thread, attempt, limits.take, server, self.id, working, waiting)
        provider.renew_at = begun + limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
        provider.said = working + sum(granted.values())
        self._answer(provider, {int(user_id): count for user_id, count in granted.items()})

    def _answer(self, provider: _Provider, counts: Mapping[int, int | None], *, may_begin: bool = True) -> None:
        """End this number of each user's waits; None means all. Some may have been cancelled meanwhile."""
        for user_id, count in counts.items():
            line = provider.lines.get(user_id, [])
            begun = line[:count]
            del line[:count]
            for turn in begun:
                if not turn.done():
                    turn.set_result(may_begin)
                    provider.working += may_begin


class Process:
    """What the runs of one process share. Changed on the event loop, except that the heartbeat changes the lease."""

    def __init__(self) -> None:
        self.db_threads = ThreadPoolExecutor(settings.RUN_WORKER_DB_THREADS, "run-db")
        self.tool_places = Share(settings.TOOL_CALLS_PER_USER)
        self.tool_threads = Threads(RUN_WORKER_TOOL_THREADS, TOOL_THREADS_PER_USER, "run-tool")
        self.file_threads = Threads(RUN_WORKER_FILE_THREADS, FILE_THREADS_PER_USER, "run-file")
        self.attachment_bytes = Share(ATTACHMENT_BYTES_PER_USER)
        self.worker_id = ""
        self.lease_until = 0.0  # until when the lease certainly holds, by ``clock.steady``
        self.draining = False
        self.model_places = ModelPlaces(leaving=lambda: self.draining)
        self.credit_line = CreditLine(leaving=lambda: self.draining)
        # The sessions with unwritten streamed text, and those of them whose turn has shown no text yet.
        self.unwritten, self.begun = Gathered(STREAM_FLUSH_SECONDS), Gathered(FIRST_TEXT_SECONDS)
        # Each user's share of the database threads; it exists while a step of the user needs it.
        self.shares: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        # Claims of runs whose users are not known yet.
        self.first_claims = asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 4))
        self.wanted: dict[str, asyncio.Future[int | None]] = {}  # the runs whose users are looked up
        self.look_up = asyncio.Lock()

    async def user_of(self, run_id: str) -> int | None:
        """The id of the run's user; None if there is no such run. All waiting calls share the next query."""
        answer = self.wanted.setdefault(run_id, asyncio.get_running_loop().create_future())
        async with self.look_up:
            if not answer.done():
                asked = list(self.wanted)
                rows = Run.objects.filter(pk__in=asked).values_list("pk", "user_id")
                found = await self.db(lambda: dict(rows))
                for other in asked:
                    self.wanted.pop(other).set_result(found.get(other))
        return answer.result()

    def tool_context(self, run: Run, call: ToolInvocation, **own: Any) -> ToolContext:
        return ToolContext(
            invocation_id=call.id,
            run_id=run.id,
            chat_id=run.chat_id,
            user_id=run.user_id,
            threads=self.tool_threads,
            file_threads=self.file_threads,
            remote_task=call.remote_task,
            **own,
        )

    async def db(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a database step of the process itself."""
        return await persist(self.db_threads, step, *args, **kwargs)

    async def db_for(self, user_id: int, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a database step of a user's run. The user, whose rows may be locked, has a share of the threads."""
        places = asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 2))
        async with self.shares.setdefault(user_id, places):
            return await self.db(step, *args, **kwargs)
