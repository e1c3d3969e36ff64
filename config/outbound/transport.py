"""The requests of the outbound client over aiohttp, whose import costs a process 15 MiB: ``client`` imports this module
when it sends the first request. Requests to model servers share its sessions and sockets.
"""

import asyncio
import atexit
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Hashable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import aiohttp
import certifi
from aiohttp.abc import AbstractResolver, ResolveResult
from django.conf import settings
from yarl import URL

from config.outbound import addresses
from config.outbound.addresses import Answer, RequestFailed, RequestTimedOut
from config.outbound.loop import shared

# Shorter than the keep-alive of common servers (2 to 75 s). If a server closes a connection during a request, the
# request is lost and cannot be repeated safely.
IDLE_SECONDS = 1.0
LINE_MAX_BYTES = 64 * 1024  # the limit of the status line and of each of at most 128 headers of an answer
# Only the caller sets headers. Without Accept-Encoding, an answer is not compressed, so the size limit is exact.
SKIPPED_DEFAULT_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
CLOSE_SECONDS = 1.0
# A step that ends later than this after its limit was suspended with the process. A busy event loop is late by less.
STOOD_STILL_SECONDS = 1.0
# Bytes of an answer that may have no content: heads, interim (1xx) answers, framing of chunks and TLS, empty lines and
# comments of a stream. More would let a hostile server delay the event loop; usual answers and buffers have far less.
SPARE_BYTES = 256 * 1024
READ_BYTES = 16 * 1024  # the most bytes of one read, which are parsed before the loop serves the next connection
CLOSED_WITHOUT_ANSWER = "The connection was closed without an answer."


async def request(method: str, url: str, *, total_timeout: float, max_bytes: int, **options: Any) -> Answer:
    """Send one request. ``options`` and errors: ``Exchange.open``; RequestTimedOut after ``total_timeout`` seconds."""
    exchange = Exchange()
    try:
        async with asyncio.timeout(total_timeout):
            response = await exchange.open(method, url, **options)
            parts: list[bytes] = []
            with contextlib.suppress(RequestFailed):  # what has arrived is the answer, and ``truncated``
                async for part in exchange.parts(max_bytes):
                    parts.append(part)
            return Answer(response.status, response.headers, b"".join(parts)[:max_bytes], not exchange.complete)
    except TimeoutError:
        raise RequestTimedOut(f"Timed out after {total_timeout:g} s.") from None
    finally:
        exchange.close()


class Exchange:
    """One request and its answer, whose body is read in parts. Call ``close`` in any case; it does not wait."""

    def __init__(self) -> None:
        self.owner = ""
        self.looking_up = self.complete = False
        self.connection: asyncio.WriteTransport | None = None
        self.response: aiohttp.ClientResponse | None = None

    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        allow_private: bool,
        https_only: bool = False,
        reuse: bool = False,
        owner: str = "",
    ) -> aiohttp.ClientResponse:
        """Send the request, and wait for the head of its answer. With ``reuse``, later requests to the same host and
        port may use the connection for IDLE_SECONDS. Raises AddressRefused, ValueError (the URL is not valid),
        RequestTimedOut, RequestFailed.
        """
        parsed = addresses.parse(url, https_only)
        host = addresses.host_of(parsed)
        target = parsed._replace(host=f"[{host}]" if ":" in host else host, fragment=None)
        seconds = settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS  # for look-up, connect and handshake
        timeout = aiohttp.ClientTimeout(connect=seconds, ceil_threshold=float("inf"))
        # A time-out before the look-up begins is one of the look-up.
        self.owner, self.looking_up = owner, not addresses.is_address(host)
        _exchange.set(self)
        # The event loop runs once and notices which idle connections the servers have closed.
        await asyncio.sleep(0)
        while True:
            started = time.monotonic()
            try:
                self.response = await _session(allow_private, reuse).request(
                    method,
                    URL(target.url, encoded=True),  # so that aiohttp changes nothing
                    data=body,
                    headers={"Accept-Encoding": "identity", **headers},
                    ssl=tls_context() if parsed.scheme == "https" else True,
                    allow_redirects=False,
                    timeout=timeout,
                )
                return self.response
            except aiohttp.ConnectionTimeoutError as error:
                # A process that was suspended while it connected has sent nothing yet: it connects again.
                if time.monotonic() - started <= seconds + STOOD_STILL_SECONDS:
                    raise self._failure(error) from None
            except aiohttp.ClientError as error:
                raise self._failure(error) from None

    async def parts(self, max_bytes: int) -> AsyncIterator[bytes]:
        """The body as it arrives, until ``complete`` or over ``max_bytes``. Raises RequestFailed if it breaks off."""
        response: Any = self.response
        left = max_bytes + 1
        try:
            while left and (part := await response.content.read(left)):
                left -= len(part)
                earn(response, len(part))
                yield part
        except aiohttp.ClientError:
            raise RequestFailed("The connection broke during the answer.") from None
        if left:
            self.complete = True
            response.release()

    def close(self) -> None:
        """Abort an unfinished connection: aiohttp's ``close`` would wait for ever for a receiver that does not read."""
        connection, self.connection = self.connection, None
        # aiohttp releases a connection when the whole answer has arrived: another exchange may use it already.
        if connection is not None and (used := _socket_of(connection)) is not None and used.exchange is self:
            used.exchange = None
            if not self.complete or connection.get_write_buffer_size():
                connection.abort()
        if self.response is not None:
            self.response.close()

    def _failure(self, error: aiohttp.ClientError) -> RequestFailed:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if isinstance(error, aiohttp.ConnectionTimeoutError) and self.looking_up:
            return RequestFailed(addresses.LOOKUP_TIMED_OUT)
        if isinstance(cause, TimeoutError):
            return RequestTimedOut("Timed out while connecting.")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            reason = getattr(error.certificate_error, "verify_message", "") or "the certificate is not valid"
            return RequestFailed(f"TLS: {reason}.")
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            return RequestFailed("TLS: the handshake failed.")
        if isinstance(cause, ConnectionRefusedError):
            return RequestFailed("The connection was refused.")
        if isinstance(cause, (ConnectionResetError, BrokenPipeError)):
            return RequestFailed(CLOSED_WITHOUT_ANSWER)
        connecting = isinstance(error, aiohttp.ClientConnectorError)
        return RequestFailed("The host could not be reached." if connecting else "The answer was not HTTP.")


class CountedSocket(socket.socket):
    """Each byte that is read costs one of ``left``; each byte of content earns two: itself, and one of its framing."""

    left = SPARE_BYTES
    exchange: Exchange | None = None  # the one that uses it now

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = super().recv(min(bufsize, READ_BYTES), flags)
        self._spend(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, min(nbytes or len(buffer), READ_BYTES), flags)
        self._spend(count)
        return count

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ConnectionAbortedError("The answer carries too little.")


_sockets: WeakValueDictionary[int, CountedSocket] = WeakValueDictionary()


def counted_socket(target: tuple[Any, ...]) -> socket.socket:
    """aiohttp's ``socket_factory``."""
    found = CountedSocket(*target[:3])
    _sockets[found.fileno()] = found
    return found


def _socket_of(transport: asyncio.BaseTransport | None) -> CountedSocket | None:
    """The socket of a connection; None if it is closed."""
    known = transport.get_extra_info("socket") if transport is not None else None
    return _sockets.get(known.fileno()) if known is not None else None


def earn(response: aiohttp.ClientResponse, count: int) -> None:
    """Record bytes of an answer's content. After the whole answer has arrived, they need no record."""
    if response.connection is not None and (found := _socket_of(response.connection.transport)) is not None:
        found.left += 2 * count


# The exchange of the request that the current task opens. Tasks that ask model servers open none.
_exchange: ContextVar[Exchange] = ContextVar("exchange")


class _Request(aiohttp.ClientRequest):
    """Before it is sent, it links its exchange and its socket, and gives the socket new spare bytes."""

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        exchange = _exchange.get(None)
        if exchange is not None:
            exchange.connection = conn.transport
        if (used := _socket_of(conn.transport)) is not None:
            used.left, used.exchange = SPARE_BYTES, exchange
        return await super().send(conn)


class _Resolver(AbstractResolver):
    def __init__(self, allow_private: bool) -> None:
        self.allow_private = allow_private

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_UNSPEC) -> list[ResolveResult]:
        exchange = _exchange.get()
        targets = await addresses.resolve(host, port, allow_private=self.allow_private, owner=exchange.owner)
        exchange.looking_up = False
        return [
            ResolveResult(hostname=host, host=address[0], port=port, family=found, proto=0, flags=0)
            for found, address in targets
        ]

    async def close(self) -> None:
        pass


def _socket(target: tuple[Any, ...]) -> socket.socket:
    """A socket for this address, which is checked again directly before the connection."""
    addresses.check_socket_address(target[-1][0])
    return counted_socket(target)


async def _never_resend(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Stop aiohttp from repeating a GET after a lost connection: it repeats only after its own exceptions."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        raise RequestFailed(CLOSED_WITHOUT_ANSWER) from None


# By event loop, to which connections belong, and by the kind of the session.
_sessions: WeakKeyDictionary[Any, dict[Hashable, aiohttp.ClientSession]] = WeakKeyDictionary()


def session_for(kind: Hashable, connector: dict[str, Any], **options: Any) -> aiohttp.ClientSession:
    """The running loop's session of this kind. Sessions of different kinds share no connection. They keep no cookies,
    read no proxy from the environment and do not decompress answers.
    """
    sessions = _sessions.setdefault(asyncio.get_running_loop(), {})
    if kind not in sessions:
        options |= {"cookie_jar": aiohttp.DummyCookieJar(), "auto_decompress": False, "trust_env": False}
        options |= {"max_line_size": LINE_MAX_BYTES, "max_field_size": LINE_MAX_BYTES, "request_class": _Request}
        # Without a limit of connections: the callers have their own limits.
        sessions[kind] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, **connector), **options)
    return sessions[kind]


def _session(allow_private: bool, reuse: bool) -> aiohttp.ClientSession:
    connector: dict[str, Any] = {"keepalive_timeout": IDLE_SECONDS} if reuse else {"force_close": True}
    connector |= {"resolver": _Resolver(allow_private), "use_dns_cache": False}
    connector |= {"socket_factory": counted_socket if allow_private else _socket}
    options: dict[str, Any] = {"middlewares": (_never_resend,), "skip_auto_headers": SKIPPED_DEFAULT_HEADERS}
    return session_for((allow_private, reuse), connector, **options)


async def close_sessions() -> None:
    """Close the running loop's connections. A later request opens new ones."""
    for session in _sessions.pop(asyncio.get_running_loop(), {}).values():
        await session.close()


@atexit.register
def _close_at_exit() -> None:
    """aiohttp logs an error for each session that is open at the end of the process."""
    if shared.loop in _sessions and shared.pid == os.getpid():
        with contextlib.suppress(TimeoutError):
            shared.submit(close_sessions()).result(CLOSE_SECONDS)


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """The system's certificate authorities and those of certifi, because some container images have none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context
