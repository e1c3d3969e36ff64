"""The HTTP below the MCP SDK: connections to checked addresses alone, answers of bounded size, no environment.

``config.outbound.addresses`` decides. Each connection looks its host up once, refuses it if any address is not public,
and connects to exactly one of the checked addresses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpcore2
import httpx2
from django.conf import settings

from config.outbound.addresses import AddressRefused, LookupFailed, resolve

# Made at import: reading the certificates takes a while.
SSL_CONTEXT = httpx2.create_ssl_context(trust_env=False)
# Taking leave of a server is a courtesy that must not cost a result.
LEAVE_SECONDS = 2.0


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    def __init__(self, allow_private: bool) -> None:
        self.allow_private = allow_private
        self.plain = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (the interface's)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        limit = settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS if timeout is None else timeout
        begun = time.monotonic()
        targets = await resolve(host, port, allow_private=self.allow_private, timeout=limit)
        async with asyncio.timeout(max(begun + limit - time.monotonic(), 0)):
            failure: Exception = httpcore2.ConnectError()
            for _, address in targets:
                try:
                    # Shared out, so an address that swallows packets leaves time for the next one.
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
        raise AddressRefused("Only network addresses are called.")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """``problem`` is what went wrong first, in words for people; ``status_code`` that of the newest answer.

    The SDK makes something else of most exceptions, so who calls it looks here.
    """

    def __init__(self, *, allow_private: bool, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.problem: str | None = None
        self.status_code = 0
        self.pool = httpcore2.AsyncConnectionPool(
            ssl_context=SSL_CONTEXT, network_backend=GuardedBackend(allow_private), retries=0
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            async with asyncio.timeout(LEAVE_SECONDS if request.method == "DELETE" else None):
                answer = await self.pool.handle_async_request(
                    httpcore2.Request(
                        request.method,
                        httpcore2.URL(
                            scheme=request.url.raw_scheme,
                            host=request.url.raw_host,
                            port=request.url.port,
                            target=request.url.raw_path,
                        ),
                        headers=request.headers.raw,
                        content=request.stream,
                        extensions=request.extensions,
                    )
                )
        except Exception as error:
            raise self.failed(request, error) from None
        self.status_code = answer.status
        headers = httpx2.Headers(answer.headers)
        if headers.get("content-encoding", "identity") != "identity":
            # What is unpacked has no bound on the wire, and nothing was to be packed.
            await answer.aclose()
            raise self.failed(request, TooLarge("The answer is compressed."))
        return httpx2.Response(
            answer.status, headers=answer.headers, stream=Bounded(self, request, answer), extensions=answer.extensions
        )

    def failed(self, request: httpx2.Request, error: Exception) -> httpx2.TransportError:
        if self.problem is None and request.method == "POST":
            self.problem = words(error)
        return httpx2.TransportError("The request failed.", request=request)

    async def aclose(self) -> None:
        await self.pool.aclose()


class TooLarge(Exception):
    pass


class Bounded(httpx2.AsyncByteStream):
    """An answer's body, of ``max_bytes`` at most."""

    def __init__(self, transport: GuardedTransport, request: httpx2.Request, answer: httpcore2.Response) -> None:
        self.transport, self.request, self.answer = transport, request, answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for part in self.answer.aiter_stream():
                size += len(part)
                if size > self.transport.max_bytes:
                    raise TooLarge(f"The answer has more than {self.transport.max_bytes} bytes.")
                yield part
        except Exception as error:
            raise self.transport.failed(self.request, error) from None

    async def aclose(self) -> None:
        await self.answer.aclose()


def words(error: Exception) -> str:
    """For people; holds neither address nor header of the request."""
    if isinstance(error, (AddressRefused, LookupFailed, TooLarge)):
        return str(error)
    if isinstance(error, (TimeoutError, httpcore2.TimeoutException)):
        return "Timed out while connecting."
    if isinstance(error, (httpcore2.ConnectError, OSError)):
        return "The server could not be reached."
    if isinstance(error, (httpcore2.ReadError, httpcore2.WriteError, httpcore2.RemoteProtocolError)):
        return "The connection broke off."
    return "The answer was not HTTP."
