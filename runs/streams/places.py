"""Places that a user holds for a while: open streams, and MCP calls that wait. Each kind has a limit per user.

Redis counts the places of all processes. While Redis is not available, the limit holds per process. A place ends by
itself after its lease, in case its process died.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from functools import cache
from typing import TYPE_CHECKING

from config.api import ratelimit
from config.kernel.errors import RateLimited
from config.queue.publisher import Source, publisher
from config.redis import client

if TYPE_CHECKING:
    import redis

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
RETRY_AFTER_SECONDS = 1
# The places of a user are a sorted set; a score is the end of the lease in milliseconds of Redis' own time. KEYS: the
# user's places.
NOW = "local time = redis.call('TIME') local now = time[1] * 1000 + math.floor(time[2] / 1000)\n"
# ARGV: limit, lease, place. Returns {1} if the place was free.
TAKE = f"""{NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return {{0}} end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {{1}}
"""
# ARGV: lease, places.
RENEW = f"""{NOW}
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""


class Places:
    """The places of one kind. ``take`` waits for Redis, the other methods do not; all may be called on any thread."""

    def __init__(self, kind: str, lease_seconds: float, refusal: str) -> None:
        self.kind, self.refusal = kind, refusal
        self.lease_seconds = lease_seconds
        # The places that this process has taken: its user's key, and when its lease ends by the monotonic clock.
        self.held: dict[str, tuple[str, float]] = {}
        self.lock = threading.Lock()
        # Clients that were disconnected by a shutdown need their places in other processes.
        atexit.register(self.free_all)

    def take(self, user_id: int, limit: int) -> str:
        """A place of the user. Raises RateLimited if the user holds ``limit`` already."""
        key, place = f"places:{self.kind}:{user_id}", secrets.token_hex(8)
        answer = ratelimit.run(TAKE, [key], [limit, self._lease(), place])
        now = time.monotonic()
        with self.lock:
            here = sum(other == key and until > now for other, until in self.held.values()) if answer is None else 0
            if here >= limit or answer == [0]:
                raise RateLimited(self.refusal, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
            self.held[place] = key, now + self.lease_seconds
        return place

    def free(self, place: str | None) -> None:
        with self.lock:
            key, _ = self.held.pop(place or "", ("", 0))
        if key:
            publisher.put(source, (key, [place], 0))

    def free_all(self) -> None:
        for place in list(self.held):
            self.free(place)

    def renew(self) -> None:
        """Begin a new lease of every place that this process holds."""
        places: dict[str, list[str]] = {}
        until = time.monotonic() + self.lease_seconds
        with self.lock:
            for place, (key, _) in self.held.items():
                places.setdefault(key, []).append(place)
                self.held[place] = key, until
            for key, some in places.items():
                publisher.put(source, (key, some, self._lease()))

    def _lease(self) -> int:
        return round(self.lease_seconds * 1000)


@cache
def connection() -> redis.Redis:
    return client(reconnect=True)


def send(changes: list[tuple[str, list[str], int]]) -> None:
    """Each change is a user's key, its places, and their new lease in milliseconds, or 0 if they are free."""
    with connection().pipeline(transaction=False) as pipeline:
        renew = connection().register_script(RENEW)
        for key, places, lease in changes:
            if lease:
                renew(keys=[key], args=[lease, *places], client=pipeline)
            else:
                pipeline.zrem(key, *places)
        pipeline.execute()


def failed(error: Exception) -> None:
    logger.info("places are not renewed for %g s (%s)", PAUSE_SECONDS, type(error).__name__)


source = Source(send, 0.0, PAUSE_SECONDS, failed)
