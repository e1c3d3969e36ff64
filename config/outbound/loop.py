"""What waits on the network beside a process's own work: one event loop, and room for its sockets."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """One event loop on one thread a process, started by the first call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.pid = 0

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """From any thread but the loop's own. The work may begin before this returns."""
        with self.lock:
            if self.loop is None or self.pid != os.getpid():  # a fork takes the loop along, but not the thread
                self.loop, self.pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self.loop.run_forever, name=self.name, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self.loop)


# Of requests to addresses that users and staff name.
outbound = Loop("outbound")


def allow_files(wanted: int) -> None:
    """Each connection is an open file: raise this process's limit towards what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + 256
    if soft != resource.RLIM_INFINITY and soft < enough:
        limit = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
