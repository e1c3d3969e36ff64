"""A decoder of server-sent events. It holds nothing that is specific to a provider."""

from __future__ import annotations

import json
import re
from typing import Any

from django.conf import settings

# JSON up to this size is read within milliseconds, whatever it holds. A longer event is long because of a few texts,
# and so many numbers, arrays or objects would hold up the event loop.
SHORT_BYTES = 256 * 1024
TEXTS_MAX = 20_000
# The closing quote is optional, so that an unfinished string is scanned once and not again from each of its quotes.
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


class EventTooLong(Exception):
    """An event, or a line of one, of more than MODEL_EVENT_MAX_BYTES."""


def read_event(data: bytes) -> Any:
    """The JSON of an event. Raises ValueError or RecursionError."""
    if len(data) > SHORT_BYTES and len(_TEXT.sub(b"", data, TEXTS_MAX)) > SHORT_BYTES:
        raise ValueError("too many values")
    return json.loads(data)


class SseDecoder:
    """Takes chunks of any length. A chunk may end within a line, a character or a line break."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        # Of the lines in ``_data``, with their field names: a line without a value takes memory too.
        self._data_bytes = 0
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
                elif self._data and not line.rstrip(b"\r"):
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._data_bytes = 0
        if len(self._rest) + self._data_bytes > settings.MODEL_EVENT_MAX_BYTES:
            raise EventTooLong
        return events
