"""Events of a run's stream as server-sent events: the bytes that a client receives (docs/streams.md).

Only the servers of streams render frames. What reads events inside the service uses ``reads.Event``.
"""

from __future__ import annotations

from collections.abc import Iterable

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
