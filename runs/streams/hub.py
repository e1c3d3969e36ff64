"""The open streams of one process: what they have in common is looked up once, however many they are.

A stream reads at its own pace from its position, so a slow one holds nothing up and gathers nothing. Redis says which
runs have news; all runs with news are then read in one query. One shared query a moment does the same while Redis is
away. No stream has a thread or a database connection of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import redis
from django.conf import settings

from config.database.retry import persist
from config.queue import wakeups
from config.redis import async_client
from runs import metrics
from runs.streams import reads
from runs.streams.reads import Frame

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Not followed by a blank line: to some clients that would be the end of an empty event.
COMMENT = b": keep-alive\n"
BATCH_RUNS = 100
RETRY_SECONDS = 0.5
PING_SECONDS = 10.0
# What a run's channel keeps for its streams that are up to date; one further behind reads for itself.
TAIL_BYTES = 64 * 1024
SEND_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Opening:
    """A stream that may be opened: whose, of which run, from where.

    ``last`` and ``over`` are the run's state when that was decided; ``expires_at`` is a session token's end in seconds
    since the epoch.
    """

    run_id: str
    after: int
    last: int
    over: bool
    user_id: int
    key_id: str | None = None
    expires_at: float | None = None


class Channel:
    """One run that is streamed: ``frames`` are its events up to ``last``, as many as are kept."""

    __slots__ = ("final", "frames", "gone", "last", "run_id", "size", "streams", "waiters")

    def __init__(self, opening: Opening) -> None:
        self.run_id = opening.run_id
        self.last = opening.last
        self.final = opening.last if opening.over else None
        self.frames: deque[Frame] = deque()
        self.size = 0
        self.gone = False
        self.streams: set[Stream] = set()
        self.waiters: list[asyncio.Future[None]] = []

    def take(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.size += len(frame.body)
        self.last = frame.index
        if frame.ends:
            self.final = frame.index

    def trim(self) -> None:
        """Drop what every stream has, and what is too much."""
        seen = min((stream.position for stream in self.streams), default=self.last)
        while self.frames and (self.frames[0].index <= seen or self.size > TAIL_BYTES):
            self.size -= len(self.frames.popleft().body)

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def kept_after(self, position: int) -> list[Frame] | None:
        """The frames after ``position``; None if they are not all here."""
        if not self.frames or self.frames[0].index > position + 1:
            return None
        return [frame for frame in self.frames if frame.index > position]


class Stream:
    """One open stream. ``await next()`` until it is None; ``leave`` in any case."""

    __slots__ = ("channel", "closed", "hub", "opening", "position", "started")

    def __init__(self, hub: Hub, channel: Channel, opening: Opening) -> None:
        self.hub, self.channel, self.opening = hub, channel, opening
        self.position = opening.after
        self.closed = False
        self.started = False

    async def next(self) -> bytes | None:
        """The next bytes to send: events, or a comment that keeps the connection open. None: the stream is over."""
        if not self.started:
            self.started = True
            return COMMENT
        while not (self.closed or self.channel.gone):
            channel = self.channel
            if channel.final is not None and self.position >= channel.final:
                return None
            if self.position < channel.last:
                frames = channel.kept_after(self.position)
                if frames is None:
                    frames = await self._read()
                if not frames:
                    return None  # the run is no more
                return self._pack(frames)
            waiter = asyncio.get_running_loop().create_future()
            channel.waiters.append(waiter)
            done, _ = await asyncio.wait((waiter,), timeout=settings.STREAM_HEARTBEAT_SECONDS)
            if not done:
                if waiter in channel.waiters:
                    channel.waiters.remove(waiter)
                return COMMENT
        return None

    async def _read(self) -> list[Frame]:
        frames = await self.hub.ask(reads.page, self.channel.run_id, self.position)
        return frames or await self.hub.ask(reads.rebuilt, self.channel.run_id, self.position)

    def _pack(self, frames: list[Frame]) -> bytes:
        parts: list[bytes] = []
        size = 0
        for frame in frames:
            if parts and size + len(frame.body) > SEND_BYTES:
                break
            parts.append(frame.body)
            size += len(frame.body)
            self.position = frame.index
        return b"".join(parts)

    def close(self) -> None:
        self.closed = True
        self.channel.wake()

    def leave(self) -> None:
        self.closed = True
        self.channel.streams.discard(self)
        if not self.channel.streams and self.hub.channels.get(self.channel.run_id) is self.channel:
            del self.hub.channels[self.channel.run_id]
        self.hub.count -= 1


class Hub:
    """Belongs to the event loop it was made on; ``count`` streams are open."""

    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self.count = 0
        metrics.streams_open.follow(lambda: self.count)
        self.listening = False
        self.threads = ThreadPoolExecutor(settings.STREAM_DB_THREADS, "stream-db")
        self._news: set[str] = set()
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [
            # Not in the context, and under the request id, of whoever opened the first stream.
            loop.create_task(self._keep_up(work), context=contextvars.Context())
            for work in (self._listen, self._fetch, self._look, self._check)
        ]

    def join(self, opening: Opening) -> Stream:
        channel = self.channels.get(opening.run_id)
        if channel is None:
            channel = self.channels[opening.run_id] = Channel(opening)
        stream = Stream(self, channel, opening)
        channel.streams.add(stream)
        self.count += 1
        if channel.final is None:
            # What was written since the run was looked at.
            self._note(opening.run_id)
        return stream

    async def close(self) -> None:
        for channel in list(self.channels.values()):
            for stream in list(channel.streams):
                stream.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query on a thread; repeated while the database is away."""
        return await persist(self.threads, query, *args, **kwargs)

    async def _keep_up(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                logger.exception("%s failed and begins anew", work.__name__)
            await asyncio.sleep(RETRY_SECONDS)

    # --- news --------------------------------------------------------------------------------------------------------

    def _note(self, run_id: str) -> None:
        if run_id in self.channels:
            self._news.add(run_id)
            self._wake.set()

    async def _listen(self) -> None:
        """Redis says which runs have new events."""
        url = settings.CACHE_REDIS_URL
        try:
            async with async_client(url) as client, client.pubsub() as subscription:
                await subscription.subscribe(wakeups.channel(url))
                while True:
                    message = await subscription.get_message(timeout=PING_SECONDS)
                    if message is None:
                        # A connection that has died without a word is found by asking.
                        await subscription.ping()
                        message = await subscription.get_message(timeout=settings.BROKER_TIMEOUT_SECONDS)
                        if message is None:
                            raise redis.TimeoutError("no answer to a ping")
                    if message["type"] == "subscribe":
                        self.listening = True
                    elif message["type"] == "message":
                        for run_id in message["data"].decode("ascii", "ignore").split():
                            self._note(run_id)
        except (redis.RedisError, OSError, ValueError) as error:
            if self.listening:
                logger.warning("streams look by themselves while Redis is away (%s)", type(error).__name__)
        finally:
            self.listening = False

    async def _look(self) -> None:
        """One query for all runs, in case a message was lost; often while none can come."""
        looked_at = float("-inf")
        listened = False
        while True:
            await asyncio.sleep(settings.STREAM_POLL_SECONDS)
            due = settings.STREAM_CHECK_SECONDS if self.listening and listened else 0.0
            listened = self.listening
            if not self.channels or time.monotonic() - looked_at < due:
                continue
            looked_at = time.monotonic()
            # A channel that comes about meanwhile is not among those asked for, but knows its state.
            asked = dict(self.channels)
            found = await self.ask(reads.positions, list(asked))
            for run_id, channel in asked.items():
                if run_id not in found:
                    channel.gone = True
                    channel.wake()
                elif found[run_id] > channel.last:
                    self._note(run_id)

    async def _fetch(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._news:
                some = [self._news.pop() for _ in range(min(len(self._news), BATCH_RUNS))]
                wanted = {run_id: self.channels[run_id].last for run_id in some if run_id in self.channels}
                if wanted:
                    found, more = await self.ask(reads.tails, wanted)
                    self._take(found)
                    if more:
                        self._news.update(wanted)

    def _take(self, found: list[tuple[str, Frame]]) -> None:
        fresh: dict[str, Channel] = {}
        for run_id, frame in found:
            channel = self.channels.get(run_id)
            # The channel may have gone meanwhile, and another of the same run be there, elsewhere in it.
            if channel is not None and frame.index == channel.last + 1:
                channel.take(frame)
                fresh[run_id] = channel
        for channel in fresh.values():
            channel.trim()
            channel.wake()

    # --- who may go on listening -------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Close the streams whose key was revoked, whose token has expired or whose user was deactivated."""
        while True:
            await asyncio.sleep(settings.STREAM_AUTH_SECONDS)
            streams = [stream for channel in self.channels.values() for stream in channel.streams]
            if not streams:
                continue
            users, keys = await self.ask(
                reads.live_credentials,
                {stream.opening.user_id for stream in streams},
                {stream.opening.key_id for stream in streams if stream.opening.key_id},
            )
            for stream in streams:
                opening = stream.opening
                expired = opening.expires_at is not None and opening.expires_at <= time.time()
                revoked = opening.key_id is not None and opening.key_id not in keys
                if expired or revoked or opening.user_id not in users:
                    stream.close()
