"""The HTTP protocol class of the stream processes: uvicorn's, with a time limit for the first request and with the
API's error envelope as the response to invalid HTTP."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15.0
# Written here in full, because this module must not import code that needs the settings.
ENVELOPE = b'{"error": {"code": "VALIDATION_ERROR", "message": "The request is not valid HTTP."}}'


class Protocol(H11Protocol):
    """Closes a connection without a complete request head after REQUEST_SECONDS. uvicorn waits for ever for the first
    request."""

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
