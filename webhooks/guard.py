"""Outbound HTTP to addresses that users name: webhook receivers and tools.

Nothing else in the service may call such an address.

A host is resolved once, refused if any of its addresses is not public, and connected to at exactly a checked address,
so no second look-up can lead elsewhere. Redirects are not followed, proxies and other settings of the environment are
ignored, certificates are verified, and one deadline covers look-up, connect, handshake, request and answer, however
slowly the other side drips.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import certifi
from urllib3 import HTTPConnectionPool, HTTPResponse, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, LocationParseError, ReadTimeoutError
from urllib3.util import Timeout, Url, parse_url

from webhooks.addresses import AddressRefused, LookupFailed, find_targets

__all__ = ["AddressRefused", "Answer", "RequestFailed", "RequestTimedOut", "check_url", "send"]

DEFAULT_PORTS = {"http": 80, "https": 443}
READ_SIZE = 16 * 1024
# Below the keep-alive of common servers (2 to 75 s): a connection that the other side is just closing loses a request,
# and sending that again might make it twice.
IDLE_SECONDS = 1.0
POOLED_HOSTS = 256
POOLED_CONNECTIONS_PER_HOST = 64


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


def send(
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

    With ``reuse``, connections are kept for a moment for the same host and port. Nothing is ever sent twice.

    Raises AddressRefused, ValueError (the URL), RequestTimedOut, RequestFailed.
    """
    parsed = _parse(url, https_only)
    call = _Call(time.monotonic() + total_timeout, connect_timeout, allow_private)
    lower = {name.lower() for name in headers}
    wanted = {**headers}
    if "accept-encoding" not in lower:
        wanted["Accept-Encoding"] = "identity"  # the bound on the body is one on the wire, so nothing is unpacked
    with _in_call(call), _errors(total_timeout):
        if reuse:
            return _exchange(_kept(parsed, allow_private), parsed, method, wanted, body, max_bytes, call)
        with _pool_class(parsed)(_host(parsed), _port(parsed), **_pool_options(parsed)) as pool:
            wanted.setdefault("Connection", "close")
            return _exchange(pool, parsed, method, wanted, body, max_bytes, call)


# --- the call that a thread is in ------------------------------------------------------------------------------------
@dataclass
class _Call:
    deadline: float
    connect_timeout: float
    allow_private: bool

    def remaining(self) -> float:
        """Seconds left; raises TimeoutError when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left


_local = threading.local()


@contextlib.contextmanager
def _in_call(call: _Call) -> Iterator[None]:
    _local.call = call
    try:
        yield
    finally:
        _local.call = None


# --- sockets and connections -----------------------------------------------------------------------------------------
class _DeadlineMixin:
    """Each operation may take what is left of the call: a time-out per operation never ends a dripping receiver."""

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(_local.call.remaining())  # type: ignore[attr-defined]
        return super().recv_into(*args, **kwargs)  # type: ignore[misc]

    def send(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(_local.call.remaining())  # type: ignore[attr-defined]
        return super().send(*args, **kwargs)  # type: ignore[misc]

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        self.settimeout(_local.call.remaining())  # type: ignore[attr-defined]
        super().sendall(*args, **kwargs)  # type: ignore[misc]


class _Socket(_DeadlineMixin, socket.socket):
    pass


class _TLSSocket(_DeadlineMixin, ssl.SSLSocket):
    pass


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """The system's authorities and certifi's, for images without any of their own."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    context.sslsocket_class = _TLSSocket
    return context


class _GuardedMixin:
    """Connects to checked addresses only."""

    last_used = 0.0

    def _new_conn(self) -> socket.socket:
        call: _Call = _local.call
        connect_by = min(call.deadline, time.monotonic() + call.connect_timeout)
        targets = find_targets(
            self.host,  # type: ignore[attr-defined]
            self.port,  # type: ignore[attr-defined]
            allow_private=call.allow_private,
            timeout=connect_by - time.monotonic(),
        )
        failure: OSError = TimeoutError("the time to connect has passed")
        for index, (family, address) in enumerate(targets):
            left = connect_by - time.monotonic()
            if left <= 0:
                failure = TimeoutError("the time to connect has passed")
                break
            sock = _Socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Shared out, so an address that swallows packets leaves time for the next one.
                sock.settimeout(left / (len(targets) - index))
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
                continue
            # The TLS handshake that may follow is one operation under this time-out.
            sock.settimeout(max(connect_by - time.monotonic(), 0.001))
            return sock
        if isinstance(failure, TimeoutError):
            raise ConnectTimeoutError(self, "connect") from failure
        raise failure

    def request(self, *args: Any, **kwargs: Any) -> None:
        self.last_used = time.monotonic()
        super().request(*args, **kwargs)  # type: ignore[misc]

    def close(self) -> None:
        self.last_used = 0.0
        super().close()  # type: ignore[misc]


class _GuardedConnection(_GuardedMixin, HTTPConnection):
    pass


class _GuardedTLSConnection(_GuardedMixin, HTTPSConnection):
    pass


class _FreshMixin:
    def _get_conn(self, timeout: float | None = None) -> Any:
        connection = super()._get_conn(timeout)  # type: ignore[misc]
        if connection.last_used and time.monotonic() - connection.last_used > IDLE_SECONDS:
            connection.close()
        return connection


class _GuardedPool(_FreshMixin, HTTPConnectionPool):
    ConnectionCls = _GuardedConnection


class _GuardedTLSPool(_FreshMixin, HTTPSConnectionPool):
    ConnectionCls = _GuardedTLSConnection


def _pool_class(parsed: Url) -> type[HTTPConnectionPool]:
    return _GuardedTLSPool if parsed.scheme == "https" else _GuardedPool


def _pool_options(parsed: Url) -> dict[str, Any]:
    return {"ssl_context": tls_context(), "cert_reqs": "CERT_REQUIRED"} if parsed.scheme == "https" else {}


@lru_cache(maxsize=2)
def _manager(allow_private: bool) -> PoolManager:
    """Kept connections. What was connected to with private addresses allowed is never used without."""
    manager = PoolManager(POOLED_HOSTS, maxsize=POOLED_CONNECTIONS_PER_HOST, block=False)
    manager.pool_classes_by_scheme = {"http": _GuardedPool, "https": _GuardedTLSPool}
    return manager


def _kept(parsed: Url, allow_private: bool) -> HTTPConnectionPool:
    return _manager(allow_private).connection_from_host(
        _host(parsed),
        _port(parsed),
        parsed.scheme,
        pool_kwargs={"maxsize": POOLED_CONNECTIONS_PER_HOST, **_pool_options(parsed)},
    )


# --- request and answer ----------------------------------------------------------------------------------------------
def _exchange(
    pool: HTTPConnectionPool,
    parsed: Url,
    method: str,
    headers: Mapping[str, str],
    body: bytes | None,
    max_bytes: int,
    call: _Call,
) -> Answer:
    response: HTTPResponse = pool.urlopen(  # type: ignore[assignment]
        method,
        parsed.request_uri,
        body=body,
        headers=dict(headers),
        retries=False,
        redirect=False,
        assert_same_host=False,
        timeout=Timeout(connect=call.remaining(), read=call.remaining()),
        preload_content=False,
        decode_content=False,
    )
    content, complete = b"", False
    try:
        content, complete = _read(response, max_bytes)
    finally:
        if complete:
            response.release_conn()
        else:
            response.close()
    return Answer(response.status, response.headers, content, not complete)


def _read(response: HTTPResponse, max_bytes: int) -> tuple[bytes, bool]:
    """At most ``max_bytes`` of the body, and whether that is all of it."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := response.read1(min(READ_SIZE, max_bytes + 1 - size)):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                return b"".join(parts)[:max_bytes], False
    except ReadTimeoutError:
        raise
    except HTTPError:
        return b"".join(parts), False
    return b"".join(parts), True


def _root(error: Exception) -> BaseException:
    """What urllib3 wrapped: the cause or, of a ProtocolError, the second argument."""
    root: BaseException = error
    while True:
        inner = root.__cause__ or next((part for part in root.args if isinstance(part, Exception)), None)
        if inner is None:
            return root
        root = inner


@contextlib.contextmanager
def _errors(total_timeout: float) -> Iterator[None]:
    """Everything that libraries and the network raise, as our own two errors."""
    try:
        yield
    except LookupFailed as error:
        raise RequestFailed(str(error)) from None
    except ConnectTimeoutError:
        raise RequestTimedOut("Timed out while connecting.") from None
    except (ReadTimeoutError, TimeoutError):
        raise RequestTimedOut(f"Timed out after {total_timeout:g} s.") from None
    except (HTTPError, OSError, http.client.HTTPException) as error:
        root = _root(error)
        if isinstance(root, TimeoutError):
            raise RequestTimedOut(f"Timed out after {total_timeout:g} s.") from None
        if isinstance(root, ssl.SSLCertVerificationError):
            raise RequestFailed(f"TLS: {root.verify_message}.") from None
        if isinstance(root, ssl.SSLError):
            raise RequestFailed("TLS: the handshake failed.") from None
        if isinstance(root, ConnectionRefusedError):
            raise RequestFailed("The connection was refused.") from None
        if isinstance(root, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
            raise RequestFailed("The connection was closed without an answer.") from None
        if isinstance(root, OSError):
            raise RequestFailed("The host could not be reached.") from None
        raise RequestFailed("The answer was not HTTP.") from None


# --- URLs ------------------------------------------------------------------------------------------------------------
def _parse(url: str, https_only: bool) -> Url:
    """The one reading of ``url`` that both the check and the connection go by. Raises ValueError."""
    if any(character <= " " or character in "\\\x7f" for character in url):
        raise ValueError("The URL must not hold spaces, control characters or backslashes.")
    try:
        parsed = parse_url(url)
    except (LocationParseError, ValueError, UnicodeError):
        raise ValueError("This is not a valid URL.") from None
    if parsed.scheme not in DEFAULT_PORTS or not parsed.host:
        raise ValueError("The URL must be absolute, with http or https.")
    if https_only and parsed.scheme != "https":
        raise ValueError("The URL must be https.")
    if parsed.auth is not None:
        raise ValueError("The URL must not hold credentials.")
    if parsed.port == 0:
        raise ValueError("This is not a valid URL.")
    return parsed


def _host(parsed: Url) -> str:
    return (parsed.host or "").strip("[]")


def _port(parsed: Url) -> int:
    return parsed.port or DEFAULT_PORTS[parsed.scheme or "http"]
