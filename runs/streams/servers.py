"""The streams of this process, and how the web server sends one: the events that the hub yields, as the bytes of
server-sent events (docs/streams.md). What reads events inside the service uses ``reads.Event``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from django.conf import settings

from config.kernel.errors import Unavailable
from runs.streams.hub import Hub, Opening, places
from runs.streams.reads import Event

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
# Not followed by a blank line: to some clients that would be the end of an empty event.
COMMENT = b": keep-alive\n"
# Line breaks to Unicode, but not to JSON nor to server-sent events; many clients split lines as Unicode does.
LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def render(events: Iterable[Event]) -> bytes:
    """The events' frames; without events, a comment that keeps the connection open."""
    return b"".join(frame(event) for event in events) or COMMENT


def frame(event: Event) -> bytes:
    """One event. Its data is JSON text, which has no line break of its own."""
    data = event.data if event.data.isascii() else event.data.translate(LINE_BREAKS)
    position = f"id: {event.index}\n" if event.numbered else ""
    return f"{position}event: {event.type}\ndata: {data}\n\n".encode("utf-8", "replace")


class Background:
    """The hub of this process. Its streams are coroutines on the process's event loop."""

    hub: Hub | None = None

    def open(self) -> Hub:
        """On the event loop only."""
        self.hub = self.hub or Hub()
        return self.hub


background = Background()


class Frames:
    """The body of one stream (``config.api.live.Body``)."""

    def __init__(self, opening: Opening) -> None:
        self.stream = background.open().join(opening)
        self.close, self.leave = self.stream.close, self.stream.leave

    async def next(self) -> bytes | None:
        events = await self.stream.next()
        return None if events is None else render(events)


def admitted(opening: Opening) -> Opening:
    """The opening with a place of its user. Raises Unavailable above STREAM_CONNECTIONS_MAX, and RateLimited above
    STREAMS_PER_USER. Call it on a thread.
    """
    if background.hub is not None and background.hub.count >= settings.STREAM_CONNECTIONS_MAX:
        raise Unavailable
    return replace(opening, place=places.take(opening.user_id, settings.STREAMS_PER_USER))
