"""Responses whose body the web server sends from its event loop, for as long as the body lasts."""

from collections.abc import Callable
from typing import Protocol

from django.http import HttpRequest

# Not an attribute of the response: libraries wrap a response on its way to the server.
KEY = "service.live_response"


class Broken(Exception):
    """The body ends before its own end: the server breaks the connection instead of ending the answer."""


class Body(Protocol):
    """Used on the event loop only. ``leave`` is called in any case."""

    async def next(self) -> bytes | None:
        """The next part, or None at the end. Raises Broken."""

    def close(self) -> None:
        """End soon: the client has left, or the process stops."""

    def leave(self) -> None: ...


def offer(request: HttpRequest, open: Callable[[], Body]) -> None:
    """Let a server that can send a body from its event loop ``open`` it there. Others send the response's content."""
    request.META[KEY] = open
