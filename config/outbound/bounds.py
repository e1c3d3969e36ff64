"""How much of an answer may carry nothing: bytes of heads, of interim (1xx) answers, of the framing of chunks and of
TLS, and of a stream's empty lines and comments. To read them costs the event loop time, so a hostile server could hold
up all others.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

# Far more than the head and the framing of a usual answer, and than what waits in buffers to be read.
SPARE_BYTES = 256 * 1024
# Of one read. What it holds is parsed before the event loop serves the next connection.
READ_BYTES = 16 * 1024


class Allowance:
    """Each byte that is read costs one; each byte of content earns two: itself, and one of its framing."""

    def __init__(self) -> None:
        self.left = SPARE_BYTES

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ConnectionAbortedError("The answer carries too little.")

    def earn(self, count: int) -> None:
        self.left += 2 * count


class CountedSocket(socket.socket):
    """A socket that reads at most READ_BYTES at once and ends when its allowance does."""

    allowance: Allowance

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = super().recv(min(bufsize, READ_BYTES), flags)
        self.allowance.spend(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, min(nbytes or len(buffer), READ_BYTES), flags)
        self.allowance.spend(count)
        return count


_sockets: WeakValueDictionary[int, CountedSocket] = WeakValueDictionary()


def counted_socket(target: tuple[Any, ...]) -> socket.socket:
    """aiohttp's ``socket_factory``."""
    family, kind, protocol, _, _ = target
    found = CountedSocket(family, kind, protocol)
    found.allowance = Allowance()
    _sockets[found.fileno()] = found
    return found


def allowance_of(transport: asyncio.BaseTransport | None) -> Allowance:
    """The allowance of the present request on a connection; one that nobody spends if the connection is closed."""
    known = transport.get_extra_info("socket") if transport is not None else None
    found = _sockets.get(known.fileno()) if known is not None else None
    return found.allowance if found is not None else Allowance()


class CountedRequest(aiohttp.ClientRequest):
    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        allowance_of(conn.transport).left = SPARE_BYTES
        return await super().send(conn)
