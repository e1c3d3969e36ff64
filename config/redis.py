"""Clients of the service's Redis, and the behaviour of the service while Redis is not available. The package redis is
imported with the first client: it takes a sixth of the time of a command that needs none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from django.conf import settings

if TYPE_CHECKING:
    import redis
    import redis.asyncio

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How long a failure is remembered, in seconds: a stalled Redis costs one time-out in this time, not one per request.
PAUSE_SECONDS = 2.0


def client(url: str | None = None, *, reconnect: bool = False, **options: Any) -> redis.Redis:
    """A client with its own pool. ``url`` defaults to CACHE_REDIS_URL. Commands raise redis.RedisError. With
    ``reconnect``, a command is repeated once if the connection was closed, but not if it timed out.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    retry = Retry(NoBackoff(), int(reconnect), supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(url or settings.CACHE_REDIS_URL, retry=retry, **_time_outs(), **options)


def async_client(url: str) -> redis.asyncio.Redis:
    """Like ``client``, for code on an event loop."""
    import redis.asyncio

    return redis.asyncio.Redis.from_url(url, **_time_outs())


def failures() -> tuple[type[Exception], ...]:
    """The exceptions of commands while Redis is not available or its URL is not valid. For ``except``."""
    from redis import RedisError

    return RedisError, OSError, ValueError


def _time_outs() -> dict[str, Any]:
    seconds = settings.BROKER_TIMEOUT_SECONDS
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds}


class Shared:
    """The client that the threads of a process share for things that the service can do without."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: redis.Redis | None = None
        self.away_until = 0.0
        self.lock = threading.Lock()

    def ask(self, question: Callable[[Any], T]) -> T | None:
        """The answer of ``question``, which gets the client; None while Redis is away."""
        if self.away_until:
            with self.lock:
                if time.monotonic() < self.away_until:
                    return None
                # This thread tries; the other threads do without Redis until it succeeds.
                self.away_until = time.monotonic() + PAUSE_SECONDS
        try:
            self.client = self.client or client(self.url, reconnect=True)
            answer = question(self.client)
        except failures() as error:
            self.away_until = time.monotonic() + PAUSE_SECONDS
            logger.warning("no limits and no wake-ups over processes: Redis failed (%s)", type(error).__name__)
            return None
        self.away_until = 0.0
        return answer


shared = lru_cache(maxsize=4)(Shared)


def ask(question: Callable[[Any], T]) -> T | None:
    """``Shared.ask`` of the service's Redis."""
    return shared(settings.CACHE_REDIS_URL).ask(question)


def run(source: str, keys: list[str], arguments: list[Any]) -> Any:
    """The answer of a Lua script; None while Redis is away."""
    return ask(lambda client: client.register_script(source)(keys, arguments))
