"""The process's event loop for work that waits on the network, and room for its sockets."""

from __future__ import annotations

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
# Files that a process opens beside the connections it plans for.
OTHER_FILES = 256


class Loop:
    """One event loop on one thread a process, started by the first call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.pid = 0

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """From any thread but the loop's own. The work may begin before this returns."""
        with self.lock:
            if self.loop is None or self.pid != os.getpid():  # a fork takes the loop along, but not the thread
                self.loop, self.pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self.loop.run_forever, name="event-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self.loop)


# Outbound requests of every kind, and the streams of a web process.
shared = Loop()


def allow_files(wanted: int | None = None) -> None:
    """Each connection is an open file: raise this process's limit to ``wanted``, or as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = FILES_MAX if hard == resource.RLIM_INFINITY else hard
    limit = highest if wanted is None else min(wanted + OTHER_FILES, highest)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
