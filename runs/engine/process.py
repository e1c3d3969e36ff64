"""What the runs of one process share: threads, places, the lease, and queues in which they wait for each other."""

import asyncio
import contextlib
from bisect import insort
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from django.conf import settings

from config.database.retry import persist
from config.limits.share import Share, Threads
from runs.engine.model_places import ModelPlaces
from runs.models import Run

# Threads of a worker process that compute for tools; calls to tools' servers need no thread.
RUN_WORKER_TOOL_THREADS = 4
# How many of `RUN_WORKER_TOOL_THREADS` one user can occupy.
TOOL_THREADS_PER_USER = 1
# Threads of a worker process that read attachments and store the files of tools.
RUN_WORKER_FILE_THREADS = 16
# How many of `RUN_WORKER_FILE_THREADS` one user can occupy.
FILE_THREADS_PER_USER = 2
# Bytes of one user's files that the requests of a worker process hold at a time; further turns wait.
ATTACHMENT_BYTES_PER_USER = 128 * 1024 * 1024

P = ParamSpec("P")
T = TypeVar("T")

# The pause between two looks, which grows: another process may have settled a hold, or staff granted credits.
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.05, 1.0

# The run's time of creation and its id.
Age = tuple[datetime, str]


class CreditLine:
    """The steps of a process that wait for credits which other steps of the same user hold. Of each user, only the
    first step looks whether the credits are there: that of the oldest run. ``lifecycle.wait_for_credits`` keeps the
    order between processes. ``leaving``: whether the process drains; then the waits end.
    """

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        # By user: the age of each waiting step's run, and the event that wakes the step.
        self._lines: dict[int, list[tuple[Age, asyncio.Event]]] = {}

    async def wait(self, user_id: int, age: Age, waits: Callable[[], Awaitable[bool]]) -> None:
        """Wait while ``waits`` returns true. Only the first of the user's line calls it. ``age`` is that of the run."""
        place = age, asyncio.Event()
        line = self._lines.setdefault(user_id, [])
        insort(line, place, key=lambda other: other[0])
        pause = LOOK_SECONDS
        try:
            while not self.leaving():
                place[1].clear()
                if line[0] is place and not await waits():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await place[1].wait()
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


class Gathered:
    """The sessions whose text a flush writes next, by run. ``added`` is set while there are any."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self.added = asyncio.Event()

    def add(self, run_id: str, session: Any) -> None:
        self.sessions[run_id] = session
        self.added.set()

    def take(self) -> list[Any]:
        taken, self.sessions = list(self.sessions.values()), {}
        self.added.clear()
        return taken

    def remove(self, run_id: str) -> None:
        self.sessions.pop(run_id, None)


class Process:
    """What the runs of one process share. Changed on the event loop, except that the heartbeat changes the lease."""

    def __init__(self) -> None:
        self.db_threads = ThreadPoolExecutor(settings.RUN_WORKER_DB_THREADS, "run-db")
        self.tool_places = Share(settings.TOOL_CALLS_PER_USER)
        self.tool_threads = Threads(RUN_WORKER_TOOL_THREADS, TOOL_THREADS_PER_USER, "run-tool")
        self.file_threads = Threads(RUN_WORKER_FILE_THREADS, FILE_THREADS_PER_USER, "run-file")
        self.attachment_bytes = Share(ATTACHMENT_BYTES_PER_USER)
        self.worker_id = ""
        # Until when the lease certainly holds, by ``clock.steady``.
        self.lease_until = 0.0
        self.draining = False
        self.model_places = ModelPlaces(leaving=lambda: self.draining)
        self.credit_line = CreditLine(leaving=lambda: self.draining)
        # The sessions with unwritten streamed text, and those of them whose turn has shown no text yet.
        self.unwritten, self.begun = Gathered(), Gathered()
        # Each user's share of the database threads; it exists while a step of the user needs it.
        self.shares: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        # Claims of runs whose users are not known yet.
        self.first_claims = asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 4))
        # The runs whose users are looked up.
        self.wanted: dict[str, asyncio.Future[int | None]] = {}
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

    async def db(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a database step of the process itself."""
        return await persist(self.db_threads, step, *args, **kwargs)

    async def db_for(self, user_id: int, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a database step of one user's run. Steps above the user's share wait in order, so that a user whose rows
        are locked does not occupy all threads.
        """
        share = self.shares.get(user_id)
        if share is None:
            share = self.shares[user_id] = asyncio.Semaphore(max(1, settings.RUN_WORKER_DB_THREADS // 2))
        async with share:
            return await self.db(step, *args, **kwargs)
