"""A decoder of server-sent events. It holds nothing that is specific to a provider."""

from __future__ import annotations

# The limit of one event: far above any event of a provider, and safe for a process with thousands of streams.
EVENT_MAX_BYTES = 8 * 1024 * 1024


class EventTooLong(Exception):
    """An event, or a line of one, of more than EVENT_MAX_BYTES."""


class SseDecoder:
    """Takes chunks of any length. A chunk may end within a line, a character or a line break."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that this chunk completes. Raises EventTooLong."""
        if b"\n" not in chunk:
            self._rest.append(chunk)
            self._grow(len(chunk))
            return []
        *lines, rest = b"".join([*self._rest, chunk]).split(b"\n")
        self._rest = [rest] if rest else []
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line.rstrip(b"\r") and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        self._size = len(rest) + sum(map(len, self._data))
        self._grow(0)
        return events

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > EVENT_MAX_BYTES:
            raise EventTooLong
