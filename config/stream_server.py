"""The stream process's HTTP connections: uvicorn's, but a client that connects has to ask for something soon."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15.0


class Protocol(H11Protocol):
    """Closes a connection on which no whole request head has come after REQUEST_SECONDS: uvicorn itself waits for the
    first one for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(REQUEST_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()
