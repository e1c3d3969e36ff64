"""Outbound HTTP to addresses that users name: webhook receivers and tools.

Nothing else in the service may call such an address.

A host is resolved once, refused if any of its addresses is not public, and connected to at exactly a checked address,
so no second look-up can lead elsewhere. Redirects are not followed, proxies and other settings of the environment are
ignored, certificates are verified, and one deadline covers look-up, connect, handshake, request and answer, however
slowly the other side drips. Nothing is ever sent twice.

``asend`` does it on the running event loop; ``send`` is for threads, and waits for the process's loop to do it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import certifi
from aiohttp.abc import AbstractResolver, ResolveResult
from urllib3.exceptions import LocationParseError
from urllib3.util import Url, parse_url
from yarl import URL

from config.outbound.addresses import (
    NOT_IN_TIME,
    AddressRefused,
    LookupFailed,
    check_socket_address,
    find_targets,
    resolve,
)
from config.outbound.loop import shared

__all__ = ["AddressRefused", "Answer", "RequestFailed", "RequestTimedOut", "asend", "check_url", "send"]

DEFAULT_PORTS = {"http": 80, "https": 443}
# Below the keep-alive of common servers (2 to 75 s): a connection that the other side is just closing loses a request,
# and sending that again might make it twice.
IDLE_SECONDS = 1.0
# Of an answer's status line and of each of its headers; there may be 128.
LINE_MAX_BYTES = 64 * 1024
# Nothing is said that the caller did not say. The bound on the body is one on the wire, so nothing is to be packed.
NO_HEADERS_OF_ITS_OWN = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
LEAVE_SECONDS = 1.0
CLOSED = "The connection was closed without an answer."


class RequestFailed(Exception):
    """No complete answer came. The message is for people and holds neither address nor header of the request."""


class RequestTimedOut(RequestFailed):
    """The deadline passed first."""


@dataclass(frozen=True)
class Answer:
    """``truncated``: the body was longer than ``max_bytes``, or broke off after the status and headers."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    truncated: bool


def check_url(url: str, allow_private: bool, *, https_only: bool = False, timeout: float = 5.0) -> None:
    """Whether ``send`` may call ``url`` as things are now.

    Raises AddressRefused, or ValueError for what is no URL of ours or a host that can't be found; both with messages
    for people. Looks the host up unless ``allow_private``, ``timeout`` seconds at most, so no transaction may be
    open.
    """
    parsed = _parse(url, https_only)
    if allow_private:
        return
    try:
        find_targets(_host(parsed), _port(parsed), allow_private=False, timeout=timeout)
    except LookupFailed as error:
        raise ValueError(str(error)) from None


def send(method: str, url: str, **options: Any) -> Answer:
    """``asend`` for a thread: blocks until the process's loop of outbound requests has done it."""
    return shared.submit(asend(method, url, **options)).result()


async def asend(
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
) -> Answer:
    """One request, one answer, whatever its status. Times in seconds.

    With ``reuse``, connections are kept for a moment for the same host and port.

    Raises AddressRefused, ValueError (the URL), RequestTimedOut, RequestFailed.
    """
    parsed = _parse(url, https_only)
    call = _Call()
    token = _call.set(call)
    try:
        with _errors(call, total_timeout):
            async with asyncio.timeout(total_timeout):
                # One round of the loop: it notices which of the kept connections have been closed until now.
                await asyncio.sleep(0)
                response = await _session(allow_private, reuse).request(
                    method,
                    _target(parsed),
                    data=body,
                    headers={"Accept-Encoding": "identity", **headers},
                    ssl=tls_context() if parsed.scheme == "https" else True,
                    allow_redirects=False,
                    timeout=_connecting_within(connect_timeout),
                )
                content, complete = await _read(response, max_bytes)
                if complete:
                    response.release()
                    call.done = True
                return Answer(response.status, response.headers, content, not complete)
    finally:
        _call.reset(token)
        call.leave()


@dataclass
class _Call:
    looking_up: bool = False
    done: bool = False
    transport: asyncio.WriteTransport | None = None

    def leave(self) -> None:
        """Closing a transport waits until all is sent, which a receiver that reads nothing puts off for ever."""
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
        call.looking_up = True
        targets = await resolve(host, port, allow_private=self.allow_private, timeout=None)
        call.looking_up = False
        return [
            ResolveResult(hostname=host, host=address[0], port=port, family=found, proto=0, flags=0)
            for found, address in targets
        ]

    async def close(self) -> None:
        pass


def _socket(target: tuple[Any, ...]) -> socket.socket:
    """For exactly this address, without a look-up or another's opinion in between."""
    family, kind, protocol, _, address = target
    check_socket_address(address[0])
    return _any_socket((family, kind, protocol, _, address))


def _any_socket(target: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = target
    return socket.socket(family, kind, protocol)


class _Request(aiohttp.ClientRequest):
    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        _call.get().transport = conn.transport
        return await super().send(conn)


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """aiohttp would send a GET again whose connection was lost; not if the exception is none of its own."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        raise RequestFailed(CLOSED) from None


# Of each loop, by what is allowed and whether connections are kept: one that was made with private addresses allowed
# is never used without.
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[bool, bool], aiohttp.ClientSession]]
_sessions = WeakKeyDictionary()


def _session(allow_private: bool, reuse: bool) -> aiohttp.ClientSession:
    sessions = _sessions.setdefault(asyncio.get_running_loop(), {})
    session = sessions.get((allow_private, reuse))
    if session is None:
        session = sessions[allow_private, reuse] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=_Resolver(allow_private),
                socket_factory=_any_socket if allow_private else _socket,
                use_dns_cache=False,
                limit=0,  # the callers' own limits hold
                **({"keepalive_timeout": IDLE_SECONDS} if reuse else {"force_close": True}),
            ),
            request_class=_Request,
            middlewares=(_once,),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=NO_HEADERS_OF_ITS_OWN,
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
def _leave() -> None:
    """aiohttp complains of sessions that are left open."""
    if shared.loop in _sessions and shared.pid == os.getpid():
        with contextlib.suppress(TimeoutError):
            shared.submit(_close()).result(LEAVE_SECONDS)


@lru_cache(maxsize=16)
def _connecting_within(seconds: float) -> aiohttp.ClientTimeout:
    """The look-up and the handshake included. The rest is under the deadline."""
    return aiohttp.ClientTimeout(connect=seconds, ceil_threshold=float("inf"))


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """The system's authorities and certifi's, for images without any of their own."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """At most ``max_bytes`` of the body, and whether that is all of it."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := await response.content.read(max_bytes + 1 - size):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                return b"".join(parts)[:max_bytes], False
    except aiohttp.ClientError:
        # What came before it broke off; ``read`` only tells of the failure.
        parts.append(response.content._read_nowait(-1))
        return b"".join(parts)[:max_bytes], False
    return b"".join(parts), True


@contextlib.contextmanager
def _errors(call: _Call, total_timeout: float) -> Iterator[None]:
    """Everything that aiohttp and the network raise, as our own two errors."""
    try:
        yield
    except LookupFailed as error:
        raise RequestFailed(str(error)) from None
    except aiohttp.ConnectionTimeoutError:
        if call.looking_up:
            raise RequestFailed(NOT_IN_TIME) from None
        raise RequestTimedOut("Timed out while connecting.") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise RequestFailed(f"TLS: {_verdict(error.certificate_error)}.") from None
    except aiohttp.ClientConnectorSSLError:
        raise RequestFailed("TLS: the handshake failed.") from None
    except aiohttp.ClientConnectorError as error:
        raise _not_connected(error.os_error) from None
    except aiohttp.ClientError:
        raise RequestFailed("The answer was not HTTP.") from None
    except TimeoutError:
        raise RequestTimedOut(f"Timed out after {total_timeout:g} s.") from None


def _verdict(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or "the certificate is not valid")


def _not_connected(error: OSError) -> RequestFailed:
    if isinstance(error, TimeoutError):
        return RequestTimedOut("Timed out while connecting.")
    if isinstance(error, ConnectionRefusedError):
        return RequestFailed("The connection was refused.")
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return RequestFailed(CLOSED)
    return RequestFailed("The host could not be reached.")


def _parse(url: str, https_only: bool) -> Url:
    """The one reading of ``url`` that both the check and the connection go by. Raises ValueError."""
    if any(character <= " " or character in "\\\x7f" for character in url):
        raise ValueError("The URL must not hold spaces, control characters or backslashes.")
    try:
        parsed = parse_url(url)
    except (LocationParseError, ValueError, UnicodeError):
        raise ValueError("This is not a valid URL.") from None
    if parsed.scheme not in DEFAULT_PORTS or not _host(parsed):
        raise ValueError("The URL must be absolute, with http or https.")
    if https_only and parsed.scheme != "https":
        raise ValueError("The URL must be https.")
    if parsed.auth is not None:
        raise ValueError("The URL must not hold credentials.")
    if parsed.port == 0:
        raise ValueError("This is not a valid URL.")
    return parsed


def _host(parsed: Url) -> str:
    """As it is looked up. Odd spellings of an IPv4 address (octal, decimal, short) become the plain one that the system
    takes them for, and a name's last dot goes: no two readers of the URL may differ over them.
    """
    host = (parsed.host or "").strip("[]").rstrip(".")
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host))
    return host


def _port(parsed: Url) -> int:
    return parsed.port or DEFAULT_PORTS[parsed.scheme or "http"]


def _target(parsed: Url) -> URL:
    """The same reading in aiohttp's terms, which takes it as it is."""
    path, _, query = parsed.request_uri.partition("?")
    host = _host(parsed)
    return URL.build(
        scheme=parsed.scheme or "",
        host=f"[{host}]" if ":" in host else host,
        port=_port(parsed),
        path=path,
        query_string=query,
        encoded=True,
    )
