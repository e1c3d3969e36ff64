"""The event loop of a process for network requests, which must not block or use the database, and its open files."""

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

FILES_MAX = 65536


class Loop:
    """One event loop on one thread per process. The first call of ``submit`` starts it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.pid = 0

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop. Call this from any thread except the loop's thread."""
        with self.lock:
            if self.loop is None or self.pid != os.getpid():  # a forked process has no copy of the thread
                self.loop, self.pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self.loop.run_forever, name="event-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """``submit`` for code on an event loop, also on this one. A cancel there cancels the work."""
        return await asyncio.wrap_future(self.submit(work))


shared = Loop()  # for all outbound requests and for the streams of a web process


def raise_open_file_limit() -> None:
    """Raise this process's limit of open files, of which each connection is one, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
