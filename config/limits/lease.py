"""Lease: places that a user holds for a while, such as open streams, with a limit per user over all processes.

Redis counts the places; without Redis, the limit holds per process. The places of a dead process end by themselves.
"""

import secrets
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any

from config import redis
from config.kernel.errors import RateLimited

# The places of a user are a sorted set; a score is the end of the lease in milliseconds of Redis' own time. KEYS: the
# user's places. ARGV: limit, lease, places. Returns whether the lease of the places has begun.
SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
for index = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
NO_LIMIT = 2**53

sender = ThreadPoolExecutor(1, "leases")  # callers of ``free`` and ``renew`` do not wait for Redis


class Lease:
    """The places of one kind. ``take`` waits for Redis, the other methods do not; all may be called on any thread."""

    def __init__(self, kind: str, seconds: float, refusal: str) -> None:
        self.kind, self.seconds, self.refusal = kind, seconds, refusal
        self.milliseconds = round(seconds * 1000)
        # The places that this process has taken: the user's key, and when the lease ends by the monotonic clock.
        self.held: dict[str, tuple[str, float]] = {}
        self.lock = threading.Lock()

    def take(self, user_id: int, limit: int) -> str:
        """A place of the user. Raises RateLimited if the user holds ``limit`` already."""
        key, place = f"places:{self.kind}:{user_id}", secrets.token_hex(8)
        answer = redis.run(SCRIPT, [key], [limit, self.milliseconds, place])
        now = time.monotonic()
        with self.lock:
            here = sum(other == key and until > now for other, until in self.held.values()) if answer is None else 0
            if here >= limit or answer == 0:
                raise RateLimited(self.refusal, headers={"Retry-After": "1"})
            self.held[place] = key, now + self.seconds
        return place

    def free(self, place: str | None) -> None:
        with self.lock:
            key, _ = self.held.pop(place or "", ("", 0))
        if key:
            sender.submit(redis.ask, methodcaller("zrem", key, place))

    def renew(self) -> None:
        """Begin a new lease of every place that this process holds."""
        until = time.monotonic() + self.seconds
        users: defaultdict[str, list[str]] = defaultdict(list)
        with self.lock:
            for place, (key, _) in self.held.items():
                users[key].append(place)
                self.held[place] = key, until
            if users:
                sender.submit(redis.ask, lambda client: self._send(client, users))

    def _send(self, client: Any, users: dict[str, list[str]]) -> None:
        renew = client.register_script(SCRIPT)
        with client.pipeline(transaction=False) as pipeline:
            for key, places in users.items():
                renew([key], [NO_LIMIT, self.milliseconds, *places], client=pipeline)
            pipeline.execute()
