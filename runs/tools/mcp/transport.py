"""The HTTP transport below the MCP SDK: the service's outbound client, with answers of limited size."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from django.conf import settings
from mcp_types import CLIENT_CAPABILITIES_META_KEY

from config.kernel.jsontext import dumps
from config.outbound.addresses import AddressRefused, RequestFailed
from config.outbound.transport import Exchange

CLOSE_SECONDS = 2.0  # the DELETE that ends a session must not delay a result
VALUES_MAX = 20_000  # the SDK creates several errors for each value of a wrong type, which blocks its event loop
LINES_MAX = 50_000
CONTENT_TYPE_MAX_CHARS = 1000  # the parser of the SDK's library is slow for long content types
# The outbound client sets these itself.
OF_THE_CONNECTION = {"connection", "content-length", "host", "transfer-encoding"}


class GuardedTransport(httpx2.AsyncBaseTransport):
    """``call``: what calls of tools send, with all digits of numbers, which the SDK would round. ``problem``: the first
    failure; ``status_code``: that of the latest answer. The SDK replaces most exceptions.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.call: dict[str, Any] | None = None
        self.problem: str | None = None
        self.status_code = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = Exchange()
        try:
            async with asyncio.timeout(CLOSE_SECONDS if request.method == "DELETE" else None):
                answer = await exchange.open(
                    request.method,
                    str(request.url),
                    headers={name: value for name, value in request.headers.items() if name not in OF_THE_CONNECTION},
                    body=self.exact(await request.aread()),
                    allow_private=settings.OUTBOUND_ALLOW_PRIVATE,
                    reuse=True,
                    owner=self.owner,
                )
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                # The size limit counts the bytes on the connection, so compression is not allowed.
                raise RequestFailed("The answer is compressed.")
            if sum(map(len, answer.headers.getall("Content-Type", ()))) > CONTENT_TYPE_MAX_CHARS:
                raise RequestFailed("The content type of the answer is too long.")
        except BaseException as error:
            exchange.close()
            raise self.failed(request, error) from None
        self.status_code = answer.status
        return httpx2.Response(answer.status, headers=list(answer.raw_headers), stream=Body(self, request, exchange))

    def exact(self, body: bytes) -> bytes | None:
        message = json.loads(body) if body else {}
        if message.get("method") != "tools/call" or self.call is None:
            return body or None
        message["params"] |= self.call
        capabilities = message["params"].get("_meta", {}).get(CLIENT_CAPABILITIES_META_KEY)
        # Older revisions have none here: they ask on the open connection, where nobody could answer in time.
        if capabilities is not None:
            # The SDK would declare that addresses can be shown to the user, too.
            capabilities["elicitation"] = {"form": {}}
        return dumps(message)

    def failed(self, request: httpx2.Request, error: BaseException) -> BaseException:
        if not isinstance(error, (AddressRefused, RequestFailed, TimeoutError, ValueError)):
            return error
        if self.problem is None and request.method == "POST":
            self.problem = str(error)
        return httpx2.TransportError("The request failed.", request=request)


class Body(httpx2.AsyncByteStream):
    """An answer's body, with at most TOOL_ANSWER_MAX_BYTES, LINES_MAX and about VALUES_MAX values."""

    def __init__(self, transport: GuardedTransport, request: httpx2.Request, exchange: Exchange) -> None:
        self.transport, self.request, self.exchange = transport, request, exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        most, body, checked = settings.TOOL_ANSWER_MAX_BYTES, bytearray(), 0
        try:
            async for part in self.exchange.parts(most):
                body += part
                # Checked when the body has grown by a quarter: all checks cost at most five checks of the whole.
                if len(body) > most or len(body) >= 1.25 * checked:
                    checked = len(body)
                    require_readable(bytes(body), len(body) > most)
                yield part
            require_readable(bytes(body))
        except Exception as error:
            raise self.transport.failed(self.request, error) from None

    async def aclose(self) -> None:
        self.exchange.close()


def require_readable(body: bytes, is_too_long: bool = False) -> None:
    """Raises RequestFailed for an answer over the limits."""
    if is_too_long:
        raise RequestFailed(f"The answer has more than {settings.TOOL_ANSWER_MAX_BYTES} bytes.")
    # This limits event streams, whose lines the SDK reads one by one.
    if max(body.count(b"\n"), body.count(b"\r")) > LINES_MAX:
        raise RequestFailed(f"The answer has more than {LINES_MAX} lines.")
    if count_values(body) > VALUES_MAX:
        raise RequestFailed(f"The answer has more than {VALUES_MAX} values.")


def count_values(body: bytes) -> int:
    """The commas outside of strings, which have no line break: a quotation mark in a comment ends with its line."""
    if body.count(b",") <= VALUES_MAX:
        return 0
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return sum(part.count(b",") for line in plain.splitlines() for part in line.split(b'"')[::2])
