"""A decoder of server-sent events. It holds nothing that is specific to a provider."""

from __future__ import annotations

from typing import Any

from config.kernel.jsontext import VALUES_MAX, from_text, has_more_values

# Bytes of one event in the answer of a provider; a longer one is a `MODEL_ERROR`.
MODEL_EVENT_MAX_BYTES = 2 * 1024 * 1024


class EventTooLong(Exception):
    """An event, or a line of one, of more than MODEL_EVENT_MAX_BYTES."""


def read_event(data: bytes) -> Any:
    """The JSON of an event. Raises ValueError or RecursionError."""
    if has_more_values(data, VALUES_MAX):
        raise ValueError("too many values")
    return from_text(data)


class SseDecoder:
    """Takes chunks of any length. A chunk may end within a line, a character or a line break."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        # Of the lines in ``_data``, with their field names: a line without a value takes memory too.
        self._data_bytes = 0
        # Of all lines of data, with their field names.
        self.total_bytes = 0
        # Whether nothing but white space was fed yet.
        self.is_fresh = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that this chunk completes. Raises EventTooLong."""
        self.is_fresh = self.is_fresh and chunk.isspace()
        self._rest += chunk
        events: list[bytes] = []
        if b"\n" in chunk:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._data.append(bytes(line[5:].strip()))
                    self._data_bytes += len(line) + 1
                    self.total_bytes += len(line)
                elif self._data and not line.rstrip(b"\r"):
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._data_bytes = 0
        if len(self._rest) + self._data_bytes > MODEL_EVENT_MAX_BYTES:
            raise EventTooLong
        return events
