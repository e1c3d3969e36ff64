"""The stream process's HTTP connections: uvicorn's, but a client that connects has to ask for something soon, and one
that speaks no HTTP is told so in the API's error envelope."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15.0
# No code that needs the settings is loaded here, so it is written out.
ENVELOPE = b'{"error": {"code": "VALIDATION_ERROR", "message": "The request is not valid HTTP."}}'


class Protocol(H11Protocol):
    """Closes a connection on which no whole request head has come after REQUEST_SECONDS: uvicorn itself waits for the
    first one for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(REQUEST_SECONDS, self._close_if_silent)

    def send_400_response(self, msg: str) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(ENVELOPE)).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=ENVELOPE),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()
