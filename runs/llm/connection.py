"""The connections to model servers, and the time limits of one turn at a provider."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import aiohttp
from django.conf import settings

from config.outbound.transport import counted_socket, session_for, tls_context
from runs.errors import FailureReason
from runs.llm.base import ModelError

CONNECT_SECONDS = 10.0
# Shorter than the time of servers (uvicorn: 5 s): a request is lost if the server is closing its connection.
KEEPALIVE_SECONDS = 4.0
DRAIN_SECONDS = 0.1  # the connection is used again if the end of the body follows the last event within this time
# The time for the counts of tokens after the reason of an answer's end: some servers send them later.
COUNTS_SECONDS = 2.0


def session() -> aiohttp.ClientSession:
    """The running loop's session. Staff configure the addresses of model servers: private ones are allowed. The caller
    limits the time of a request, and follows no redirects, which would send the key to another server.
    """
    connector = {"keepalive_timeout": KEEPALIVE_SECONDS, "ssl": tls_context(), "socket_factory": counted_socket}
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
    return session_for("models", connector, timeout=timeout)


class Deadlines:
    """The time limits of the whole turn, of the wait for each part, and of the wait after a complete answer."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + settings.MODEL_TIMEOUT_SECONDS
        self._has: tuple[int, int | None] | None = None  # the last value of ``complete`` that ``next`` got
        self._complete_at = 0.0

    async def limit(self, awaited: Awaitable[Any]) -> Any:
        """Await within the limits, or raise ModelError. A limit of each read alone would let a slow stream go on."""
        scope = asyncio.timeout_at(min(self._end, self._loop.time() + settings.MODEL_STALL_SECONDS))
        try:
            async with scope:
                return await awaited
        except TimeoutError:
            if not scope.expired():
                raise
        raise ModelError(FailureReason.TIME_OUT if scope.when() == self._end else FailureReason.STALLED)

    async def next(self, chunks: AsyncIterator[bytes], complete: tuple[int, int | None] | None) -> bytes | None:
        """The next chunk, or None at the end. ``complete``: the characters and counted output tokens of a complete
        answer, or None. A complete answer also ends if nothing is added to it any more, or if its connection breaks.
        """
        chunk = anext(chunks, None)
        if complete is None:
            return await self.limit(chunk)
        if complete != self._has:
            self._has = complete
            seconds = COUNTS_SECONDS if complete[1] is None else DRAIN_SECONDS
            self._complete_at = min(self._end, self._loop.time() + seconds)
        try:
            async with asyncio.timeout_at(self._complete_at):
                return await chunk
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
