"""What a request of the outbound client results in: an answer or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class RequestFailed(Exception):
    """No answer was received. The message is for people and contains neither the address nor a header."""


class RequestTimedOut(RequestFailed):
    """The deadline passed before the answer was complete."""


@dataclass(frozen=True)
class Answer:
    """``truncated``: the body was longer than ``max_bytes``, or the connection closed before its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    truncated: bool
