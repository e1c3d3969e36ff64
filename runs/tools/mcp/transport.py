"""The HTTP transport below the MCP SDK: only checked addresses, answers of limited size, no proxy of the environment.

Each connection resolves its host once, is refused if ``config.outbound.addresses`` refuses any of the addresses, and
connects to exactly one of them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from decimal import Decimal
from typing import Any

import httpcore2
import httpx2
from django.conf import settings

from config.kernel.jsontext import to_text
from config.outbound.addresses import AddressRefused, LookupFailed, resolve
from config.outbound.bounds import Allowance
from config.outbound.loop import stood_still

# Created at import, because it takes long to read the certificates.
SSL_CONTEXT = httpx2.create_ssl_context(trust_env=False)
# The DELETE that ends a session must not delay a result.
CLOSE_SECONDS = 2.0
# The SDK makes several errors for each value of a wrong type, and its event loop waits meanwhile.
VALUES_MAX = 20_000
LINES_MAX = 50_000
# Of one read: the HTTP client parses it in Python.
READ_BYTES = 4 * 1024
# A text of JSON. It has no line break, so a quotation mark in a comment of an event stream opens no text.
_TEXT = re.compile(rb'"(?:[^"\\\r\n]|\\.)*+("?)')


class CountedStream(httpcore2.AsyncNetworkStream):
    """A connection, or its TLS, that is read in small parts and ends with the allowance of its call."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, allowance: Allowance) -> None:
        self.stream, self.allowance = stream, allowance

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        data = await self.stream.read(min(max_bytes, READ_BYTES), timeout)
        try:
            self.allowance.spend(len(data))
        except ConnectionAbortedError:
            raise httpcore2.ReadError from None
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self.stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self.stream.aclose()

    async def start_tls(self, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        return CountedStream(await self.stream.start_tls(*args, **options), self.allowance)

    def get_extra_info(self, info: str) -> Any:
        return self.stream.get_extra_info(info)


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    def __init__(self, allow_private: bool, owner: str, allowance: Allowance) -> None:
        self.allow_private, self.owner, self.allowance = allow_private, owner, allowance
        self.plain = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (a parameter of the base class)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        limit = settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS if timeout is None else timeout
        while True:
            begun = time.monotonic()
            try:
                return CountedStream(await self._connect(host, port, limit), self.allowance)
            except (TimeoutError, LookupFailed, httpcore2.ConnectTimeout):
                # A process that was suspended meanwhile did not really wait.
                if not stood_still(time.monotonic() - begun, limit):
                    raise

    async def _connect(self, host: str, port: int, limit: float) -> httpcore2.AsyncNetworkStream:
        deadline = time.monotonic() + limit
        targets = await resolve(host, port, allow_private=self.allow_private, timeout=limit, owner=self.owner)
        async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
            failure: Exception = httpcore2.ConnectError()
            for _, address in targets:
                try:
                    # A share of the time, so that an address without any answer leaves time for the next.
                    return await self.plain.connect_tcp(address[0], port, timeout=limit / len(targets))
                except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                    failure = error
            raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise AddressRefused("Only network addresses can be called.")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def with_numbers(mark: bytes, body: bytes) -> bytes:
    """The JSON with numbers in place of its marked texts."""
    return re.sub(rb'"%s([^"]+)"' % mark, rb"\1", body)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """``problem`` is the first failure, as a sentence; ``status_code`` is that of the latest answer.

    The SDK replaces most exceptions, so its caller reads these two.
    """

    def __init__(self, *, allow_private: bool, max_bytes: int, owner: str) -> None:
        self.max_bytes = max_bytes
        # Marks numbers with a fraction, which the SDK would write as text or round. Nobody can guess it.
        self.mark = f"number-{secrets.token_hex(16)}:"
        self.problem: str | None = None
        self.status_code = 0
        self.allowance = Allowance()
        backend = GuardedBackend(allow_private, owner, self.allowance)
        self.pool = httpcore2.AsyncConnectionPool(ssl_context=SSL_CONTEXT, network_backend=backend, retries=0)

    def exact(self, value: Any) -> Any:
        """``value`` with its fractions as marked texts, of which the request makes numbers again."""
        if isinstance(value, Decimal):
            return f"{self.mark}{to_text(value)}"
        if isinstance(value, dict):
            return {key: self.exact(part) for key, part in value.items()}
        return [self.exact(part) for part in value] if isinstance(value, list) else value

    async def _with_numbers(self, request: httpx2.Request) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """The request's headers, which may repeat arguments, and its body."""
        mark = self.mark.encode()
        body = with_numbers(mark, await request.aread())
        headers = [(name, value.replace(mark, b"")) for name, value in request.headers.raw]
        length = str(len(body)).encode()
        return [(name, length if name.lower() == b"content-length" else value) for name, value in headers], body

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        sent, body = await self._with_numbers(request)
        try:
            async with asyncio.timeout(CLOSE_SECONDS if request.method == "DELETE" else None):
                answer = await self.pool.handle_async_request(
                    httpcore2.Request(
                        request.method,
                        httpcore2.URL(
                            scheme=request.url.raw_scheme,
                            host=request.url.raw_host,
                            port=request.url.port,
                            target=request.url.raw_path,
                        ),
                        headers=sent,
                        content=body,
                        extensions=request.extensions,
                    )
                )
        except Exception as error:
            raise self.failed(request, error) from None
        self.status_code = answer.status
        headers = httpx2.Headers(answer.headers)
        if headers.get("content-encoding", "identity") != "identity":
            # The size limit counts bytes of the connection, and the request excludes compression.
            await answer.aclose()
            raise self.failed(request, TooLarge("The answer is compressed."))
        return httpx2.Response(
            answer.status, headers=answer.headers, stream=Bounded(self, request, answer), extensions=answer.extensions
        )

    def failed(self, request: httpx2.Request, error: Exception) -> httpx2.TransportError:
        if self.problem is None and request.method == "POST":
            self.problem = describe(error)
        return httpx2.TransportError("The request failed.", request=request)

    async def aclose(self) -> None:
        await self.pool.aclose()


class TooLarge(Exception):
    pass


class Values:
    """Counts the values of JSON that arrives in parts: the commas outside of texts."""

    def __init__(self) -> None:
        self.count = 0
        self._open = b""

    def add(self, part: bytes) -> None:
        data, end, match = self._open + part, 0, None
        for match in _TEXT.finditer(data):
            self.count += data.count(b",", end, match.start())
            end = match.end()
        self.count += data.count(b",", end)
        # The part may end within a text, or after the backslash of an escape.
        unfinished = match is not None and not match[1] and data[end:] in (b"", b"\\")
        self._open = b'"' + data[end:] if unfinished else b""


class Bounded(httpx2.AsyncByteStream):
    """An answer's body, of at most ``max_bytes`` and VALUES_MAX."""

    def __init__(self, transport: GuardedTransport, request: httpx2.Request, answer: httpcore2.Response) -> None:
        self.transport, self.request, self.answer = transport, request, answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, lines, values = 0, 0, Values()
        try:
            async for part in self.answer.aiter_stream():
                size += len(part)
                self.transport.allowance.earn(len(part))
                # Of an event stream, whose lines the SDK reads one by one.
                lines += part.count(b"\n")
                if lines > LINES_MAX:
                    raise TooLarge(f"The answer has more than {LINES_MAX} lines.")
                if size > self.transport.max_bytes:
                    raise TooLarge(f"The answer has more than {self.transport.max_bytes} bytes.")
                values.add(part)
                if values.count > VALUES_MAX:
                    raise TooLarge(f"The answer has more than {VALUES_MAX} values.")
                yield part
        except Exception as error:
            raise self.transport.failed(self.request, error) from None

    async def aclose(self) -> None:
        await self.answer.aclose()


def describe(error: Exception) -> str:
    """The failure as a sentence without any address or header of the request."""
    if isinstance(error, (AddressRefused, LookupFailed, TooLarge)):
        return str(error)
    if isinstance(error, (TimeoutError, httpcore2.TimeoutException)):
        return "Timed out while connecting."
    if isinstance(error, (httpcore2.ConnectError, OSError)):
        return "The server could not be reached."
    if isinstance(error, (httpcore2.ReadError, httpcore2.WriteError, httpcore2.RemoteProtocolError)):
        return "The connection broke."
    return "The answer was not HTTP."
