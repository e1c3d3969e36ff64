"""The requests of the outbound client over aiohttp, whose import costs a process 15 MiB.

Only ``client`` uses this module, when it sends the first request; what else needs aiohttp may use ``tls_context``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import aiohttp
import certifi
from aiohttp.abc import AbstractResolver, ResolveResult
from urllib3.util import Url
from yarl import URL

from config.outbound.addresses import LOOKUP_TIMED_OUT, LookupFailed, check_socket_address, is_address, resolve
from config.outbound.answers import Answer, RequestFailed, RequestTimedOut
from config.outbound.bounds import CountedRequest, allowance_of, counted_socket
from config.outbound.loop import shared, stood_still
from config.outbound.urls import host_of, parse, port_of

T = TypeVar("T")

# Shorter than the keep-alive of common servers (2 to 75 s). If a server closes a connection during a request, the
# request is lost and cannot be repeated safely.
IDLE_SECONDS = 1.0
# For the status line and for each header of an answer. An answer may have 128 headers.
LINE_MAX_BYTES = 64 * 1024
# Only the caller sets headers. Without Accept-Encoding, an answer is not compressed, so the size limit is exact.
SKIPPED_DEFAULT_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
CLOSE_SECONDS = 1.0
CLOSED_WITHOUT_ANSWER = "The connection was closed without an answer."


async def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes | None,
    connect_timeout: float,
    total_timeout: float,
    max_bytes: int,
    allow_private: bool,
    https_only: bool = False,
    reuse: bool = False,
    owner: str = "",
) -> Answer:
    """Send one request and return its answer, also with an error status. Times are in seconds.

    With ``reuse``, later requests to the same host and port may use the connection for ``IDLE_SECONDS``. The look-up
    counts for the ``owner``, a user.

    Raises AddressRefused, ValueError (the URL is not valid), RequestTimedOut, RequestFailed.
    """
    parsed = parse(url, https_only)
    # A time-out before the look-up begins is one of the look-up.
    call = _Call(owner, looking_up=not is_address(host_of(parsed)))
    token = _call.set(call)
    try:
        with _errors(call, total_timeout):
            async with asyncio.timeout(total_timeout):
                # The event loop runs once and notices which idle connections the servers have closed.
                await asyncio.sleep(0)
                send = partial(
                    _session(allow_private, reuse).request,
                    method,
                    _target(parsed),
                    data=body,
                    headers={"Accept-Encoding": "identity", **headers},
                    ssl=tls_context() if parsed.scheme == "https" else True,
                    allow_redirects=False,
                    timeout=_connect_timeout(connect_timeout),
                )
                response = await _once_connected(send, connect_timeout)
                content, complete = await _read(response, max_bytes)
                if complete:
                    response.release()
                    call.done = True
                return Answer(response.status, response.headers, content, not complete)
    finally:
        _call.reset(token)
        call.close()


async def _once_connected(send: Callable[[], Awaitable[T]], limit: float) -> T:
    """A process that was suspended while it connected has sent nothing yet: it connects again."""
    while True:
        begun = time.monotonic()
        try:
            return await send()
        except aiohttp.ConnectionTimeoutError:
            if not stood_still(time.monotonic() - begun, limit):
                raise


@dataclass
class _Call:
    owner: str
    looking_up: bool
    done: bool = False
    transport: asyncio.WriteTransport | None = None

    def close(self) -> None:
        """Abort an unfinished connection: ``close`` would wait for ever for a receiver that does not read."""
        if self.transport is not None and (not self.done or self.transport.get_write_buffer_size()):
            self.transport.abort()


_call: ContextVar[_Call] = ContextVar("call")


class _Resolver(AbstractResolver):
    def __init__(self, allow_private: bool) -> None:
        self.allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        call = _call.get()
        targets = await resolve(host, port, allow_private=self.allow_private, timeout=None, owner=call.owner)
        call.looking_up = False
        return [
            ResolveResult(hostname=host, host=address[0], port=port, family=found, proto=0, flags=0)
            for found, address in targets
        ]

    async def close(self) -> None:
        pass


def _socket(target: tuple[Any, ...]) -> socket.socket:
    """A socket for this address, which is checked again directly before the connection."""
    *_, address = target
    check_socket_address(address[0])
    return counted_socket(target)


class _Request(CountedRequest):
    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        _call.get().transport = conn.transport
        return await super().send(conn)


async def _never_resend(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Stop aiohttp from repeating a GET after a lost connection: it repeats only after its own exceptions."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        raise RequestFailed(CLOSED_WITHOUT_ANSWER) from None


# The sessions of each event loop by (allow_private, reuse). A request that may not reach private addresses never uses a
# connection of one that may.
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[bool, bool], aiohttp.ClientSession]]
_sessions = WeakKeyDictionary()


def _session(allow_private: bool, reuse: bool) -> aiohttp.ClientSession:
    sessions = _sessions.setdefault(asyncio.get_running_loop(), {})
    session = sessions.get((allow_private, reuse))
    if session is None:
        session = sessions[allow_private, reuse] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=_Resolver(allow_private),
                socket_factory=counted_socket if allow_private else _socket,
                use_dns_cache=False,
                limit=0,  # the callers have their own limits
                **({"keepalive_timeout": IDLE_SECONDS} if reuse else {"force_close": True}),
            ),
            request_class=_Request,
            middlewares=(_never_resend,),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SKIPPED_DEFAULT_HEADERS,
            auto_decompress=False,
            trust_env=False,
            max_line_size=LINE_MAX_BYTES,
            max_field_size=LINE_MAX_BYTES,
        )
    return session


async def _close() -> None:
    for session in _sessions.pop(asyncio.get_running_loop(), {}).values():
        await session.close()


@atexit.register
def _close_at_exit() -> None:
    """aiohttp logs an error for each session that is open at the end of the process."""
    if shared.loop in _sessions and shared.pid == os.getpid():
        with contextlib.suppress(TimeoutError):
            shared.submit(_close()).result(CLOSE_SECONDS)


@lru_cache(maxsize=16)
def _connect_timeout(seconds: float) -> aiohttp.ClientTimeout:
    """The limit of look-up, connect and handshake. The total deadline limits the other steps."""
    return aiohttp.ClientTimeout(connect=seconds, ceil_threshold=float("inf"))


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """The system's certificate authorities and those of certifi, because some container images have none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """At most ``max_bytes`` of the body, and whether this is the complete body."""
    parts: list[bytes] = []
    size = 0
    allowance = allowance_of(response.connection.transport if response.connection else None)
    try:
        while part := await response.content.read(max_bytes + 1 - size):
            parts.append(part)
            size += len(part)
            allowance.earn(len(part))
            if size > max_bytes:
                return b"".join(parts)[:max_bytes], False
    except aiohttp.ClientError:
        # ``read`` raises and keeps the bytes that arrived before the failure in its buffer.
        parts.append(response.content._read_nowait(-1))
        return b"".join(parts)[:max_bytes], False
    return b"".join(parts), True


@contextlib.contextmanager
def _errors(call: _Call, total_timeout: float) -> Iterator[None]:
    """Raise each exception of aiohttp and of the network as RequestFailed or RequestTimedOut."""
    try:
        yield
    except LookupFailed as error:
        raise RequestFailed(str(error)) from None
    except aiohttp.ConnectionTimeoutError:
        if call.looking_up:
            raise RequestFailed(LOOKUP_TIMED_OUT) from None
        raise RequestTimedOut("Timed out while connecting.") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise RequestFailed(f"TLS: {_certificate_problem(error.certificate_error)}.") from None
    except aiohttp.ClientConnectorSSLError:
        raise RequestFailed("TLS: the handshake failed.") from None
    except aiohttp.ClientConnectorError as error:
        raise _not_connected(error.os_error) from None
    except aiohttp.ClientError:
        raise RequestFailed("The answer was not HTTP.") from None
    except TimeoutError:
        raise RequestTimedOut(f"Timed out after {total_timeout:g} s.") from None


def _certificate_problem(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or "the certificate is not valid")


def _not_connected(error: OSError) -> RequestFailed:
    if isinstance(error, TimeoutError):
        return RequestTimedOut("Timed out while connecting.")
    if isinstance(error, ConnectionRefusedError):
        return RequestFailed("The connection was refused.")
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return RequestFailed(CLOSED_WITHOUT_ANSWER)
    return RequestFailed("The host could not be reached.")


def _target(parsed: Url) -> URL:
    """The parsed URL as aiohttp's type. ``encoded`` stops aiohttp from changing it."""
    path, _, query = parsed.request_uri.partition("?")
    host = host_of(parsed)
    return URL.build(
        scheme=parsed.scheme or "",
        host=f"[{host}]" if ":" in host else host,
        port=port_of(parsed),
        path=path,
        query_string=query,
        encoded=True,
    )
