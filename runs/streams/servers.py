"""The streams of this process, and how the web server sends one: the events that the hub yields, as frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from django.conf import settings

from config.kernel.errors import Unavailable
from runs.streams.frames import render
from runs.streams.hub import Hub, Opening, Stream, places

T = TypeVar("T")


class Background:
    """The hub of this process. Its streams are coroutines on the process's event loop."""

    def __init__(self) -> None:
        self.hub: Hub | None = None

    def join(self, opening: Opening) -> Stream:
        """On the event loop only."""
        self.hub = self.hub or Hub()
        return self.hub.join(opening)

    async def ask(self, query: Callable[[], T]) -> T:
        """``Hub.ask``, for what follows a stream."""
        self.hub = self.hub or Hub()
        return await self.hub.ask(query)


background = Background()


class Frames:
    """The body of one stream (``config.api.live.Body``)."""

    def __init__(self, opening: Opening) -> None:
        self.stream = background.join(opening)

    async def next(self) -> bytes | None:
        events = await self.stream.next()
        return None if events is None else render(events)

    def close(self) -> None:
        self.stream.close()

    def leave(self) -> None:
        self.stream.leave()


def admitted(opening: Opening) -> Opening:
    """The opening with a place of its user. Raises Unavailable above STREAM_CONNECTIONS_MAX, and RateLimited above
    STREAMS_PER_USER. Call it on a thread.
    """
    if background.hub is not None and background.hub.count >= settings.STREAM_CONNECTIONS_MAX:
        raise Unavailable
    return replace(opening, place=places.take(opening.user_id, settings.STREAMS_PER_USER))
