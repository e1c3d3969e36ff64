"""What the connections of one process share: the threads that call Django, and limits for all of them together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from config import settings


class State:
    """Used on the event loop only. ``log_access`` gets the environment, the status, the bytes sent and the seconds."""

    def __init__(
        self,
        application: Any,
        threads: int,
        keepalive: float,
        log_access: Callable[[dict[str, Any], str, int, float], None] | None = None,
    ) -> None:
        self.application = application
        self.threads = ThreadPoolExecutor(threads, "web")
        self.keepalive = keepalive
        self.log_access = log_access
        self.stopping = False
        self.connections: set[Any] = set()
        # The connections whose body arrives, the oldest first, with their function that gives up.
        self.receiving: dict[Any, Callable[[], None]] = {}
        self.body_bytes = 0

    def keep(self, count: int) -> None:
        """Count bytes of bodies. Above the limit, the request that has arrived for the longest time is given up."""
        self.body_bytes += count
        while self.body_bytes > settings.WEB_BODIES_MAX_BYTES and self.receiving:
            oldest = next(iter(self.receiving))
            self.receiving.pop(oldest)()
