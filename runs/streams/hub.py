"""The open streams of one process, which share their queries. A stream yields events; its caller renders them.

A stream reads from its position at its own pace, so a slow client delays no other and needs no buffer. Redis names the
runs that have new events; one query then reads the events of all of them. While Redis is not available, one shared
query in each STREAM_POLL_SECONDS finds these runs. No stream has its own thread or database connection.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, ParamSpec, TypeVar

from django.conf import settings

from config.database.retry import persist
from config.limits.lease import Lease
from config.queue import publisher
from config.redis import async_client, failures
from runs import metrics
from runs.streams import reads
from runs.streams.reads import Event

# Intervals at which a silent stream gets a comment line, which keeps it open; at which the credential of an open stream
# is checked again; and at which runs with open streams are read, in addition to wake-ups or while Redis sends none.
STREAM_HEARTBEAT_SECONDS = 15
STREAM_AUTH_SECONDS = 10
STREAM_CHECK_SECONDS, STREAM_POLL_SECONDS = 2, 0.2
STREAM_DB_THREADS = 2

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

BATCH_RUNS = 100
RETRY_SECONDS = 0.5
PING_SECONDS = 10.0
# The most characters that a channel keeps for streams that are up to date; a stream further behind reads pages itself.
TAIL_CHARS = 64 * 1024
places = Lease("streams", 15.0, "You have too many open streams; close one, or try again later.")


@dataclass(frozen=True, slots=True)
class Opening:
    """A stream that its caller may open, with the events after ``after``. ``last`` and ``final``: the run's last index
    when the permission was checked, ``final`` only if the run was over. ``expires_at``: the end of the session token in
    seconds since the epoch. ``place``: the user's place, which the stream gives back at its end.
    """

    run_id: str
    after: int
    last: int
    final: int | None
    user_id: int
    key_id: str | None = None
    expires_at: float | None = None
    place: str | None = None


@dataclass(eq=False, slots=True)
class Channel:
    """One run with open streams. ``events``: its latest events up to ``last``, as many as are kept."""

    run_id: str
    last: int
    final: int | None  # after this index, no event comes
    events: deque[Event] = field(default_factory=deque)
    size: int = 0
    streams: set[Stream] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: Event) -> None:
        self.events.append(event)
        self.size += len(event.data)
        self.last = event.index
        if event.final:
            self.final = event.index

    def trim(self) -> None:
        """Drop events that all streams have sent, and the oldest events above TAIL_CHARS."""
        seen = min((stream.position for stream in self.streams), default=self.last)
        while self.events and (self.events[0].index <= seen or self.size > TAIL_CHARS):
            self.size -= len(self.events.popleft().data)

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class Stream:
    """One open stream. Await ``next()`` until it returns None; call ``leave`` in any case."""

    def __init__(self, hub: Hub, channel: Channel, opening: Opening) -> None:
        self.hub, self.channel, self.opening = hub, channel, opening
        self.position = opening.after
        self.closed = self.started = False

    async def next(self) -> list[Event] | None:
        """The next events. The first list is empty, so that the client receives something at once; so is the list after
        STREAM_HEARTBEAT_SECONDS without an event. None at the stream's end.
        """
        if not self.started:
            self.started = True
            return []
        channel = self.channel
        while not self.closed:
            if channel.final is not None and self.position >= channel.final:
                return None
            if self.position < channel.last:
                if channel.events and channel.events[0].index <= self.position + 1:
                    events = [event for event in channel.events if event.index > self.position]
                else:
                    events = await self.hub.ask(reads.page, channel.run_id, self.position)
                if not events:
                    return None  # the run was deleted
                self.position = events[-1].index
                return events
            try:
                async with asyncio.timeout(STREAM_HEARTBEAT_SECONDS):
                    await channel.news.wait()
            except TimeoutError:
                return []
        return None

    def close(self) -> None:
        self.closed = True
        self.channel.wake()

    def leave(self) -> None:
        self.closed = True
        self.channel.streams.discard(self)
        if not self.channel.streams and self.hub.channels.get(self.channel.run_id) is self.channel:
            del self.hub.channels[self.channel.run_id]
        self.hub.count -= 1
        places.free(self.opening.place)


class Hub:
    """All streams of one event loop. ``count``: the number of open streams."""

    of_process: ClassVar[Hub | None] = None

    @classmethod
    def open(cls) -> Hub:
        """The hub of this process. On the event loop only."""
        cls.of_process = cls.of_process or cls()
        return cls.of_process

    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self.count = 0
        metrics.streams_open.set_function(lambda: self.count)
        self.listening = False
        self.threads = ThreadPoolExecutor(STREAM_DB_THREADS, "stream-db")
        self._news: set[str] = set()
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.tasks = [
            # In an empty context: otherwise they would log the id of the request that opened the first stream.
            loop.create_task(self._keep_up(work), context=contextvars.Context())
            for work in (self._listen, self._fetch, self._look, self._check, self._keep_places)
        ]

    def join(self, opening: Opening) -> Stream:
        channel = self.channels.setdefault(opening.run_id, Channel(opening.run_id, opening.last, opening.final))
        stream = Stream(self, channel, opening)
        channel.streams.add(stream)
        self.count += 1
        if channel.final is None:
            # Events may have been written since the view read the run.
            self._note(opening.run_id)
        return stream

    async def ask(self, query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query on a thread; repeated while the database is not available."""
        return await persist(self.threads, query, *args, **kwargs)

    async def _keep_up(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                logger.exception("%s failed and starts again", work.__name__)
            await asyncio.sleep(RETRY_SECONDS)

    def _note(self, run_id: str) -> None:
        if run_id in self.channels:
            self._news.add(run_id)
            self._wake.set()

    async def _listen(self) -> None:
        """Receive from Redis which runs have new events."""
        url = settings.CACHE_REDIS_URL
        try:
            async with async_client(url) as client, client.pubsub() as subscription:
                await subscription.subscribe(publisher.wake_channel(url))
                while True:
                    message = await subscription.get_message(timeout=PING_SECONDS)
                    if message is None:
                        # A ping finds a connection that was lost without an error.
                        await subscription.ping()
                        message = await subscription.get_message(timeout=settings.BROKER_TIMEOUT_SECONDS)
                        if message is None:
                            raise TimeoutError("no answer to a ping")
                    if message["type"] == "subscribe":
                        self.listening = True
                    elif message["type"] == "message":
                        for run_id in message["data"].decode("ascii", "ignore").split():
                            self._note(run_id)
        except failures() as error:
            if self.listening:
                logger.warning("streams poll the database while Redis is not available (%s)", type(error).__name__)
        finally:
            self.listening = False

    async def _look(self) -> None:
        """One query looks for new events of all runs, as a message may be lost; more often without Redis."""
        looked_at = float("-inf")
        listened = False
        while True:
            await asyncio.sleep(STREAM_POLL_SECONDS)
            due = STREAM_CHECK_SECONDS if self.listening and listened else 0.0
            listened = self.listening
            if not self.channels or time.monotonic() - looked_at < due:
                continue
            looked_at = time.monotonic()
            # A channel that opens during the query is not asked for; it knows its run's state.
            asked = dict(self.channels)
            found = await self.ask(reads.positions, list(asked))
            for run_id, channel in asked.items():
                if run_id not in found:
                    channel.final = 0  # the run was deleted
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

    def _take(self, found: list[tuple[str, Event]]) -> None:
        fresh: dict[str, Channel] = {}
        for run_id, event in found:
            channel = self.channels.get(run_id)
            # During the query the channel may have closed, and a new channel of the run may be at another position.
            if channel is not None and event.index == channel.last + 1:
                channel.take(event)
                fresh[run_id] = channel
        for channel in fresh.values():
            channel.trim()
            channel.wake()

    async def _keep_places(self) -> None:
        while True:
            await asyncio.sleep(places.seconds / 3)
            places.renew()

    async def _check(self) -> None:
        """Close the streams whose key was revoked, whose token expired or whose user was deactivated."""
        while True:
            await asyncio.sleep(STREAM_AUTH_SECONDS)
            streams = [stream for channel in self.channels.values() for stream in channel.streams]
            if not streams:
                continue
            user_ids = {stream.opening.user_id for stream in streams}
            key_ids = {stream.opening.key_id for stream in streams if stream.opening.key_id}
            users, keys = await self.ask(reads.live_credentials, user_ids, key_ids)
            for stream in streams:
                opening = stream.opening
                expired = opening.expires_at is not None and opening.expires_at <= time.time()
                revoked = opening.key_id is not None and opening.key_id not in keys
                if expired or revoked or opening.user_id not in users:
                    stream.close()
