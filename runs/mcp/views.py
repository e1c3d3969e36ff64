"""``/api/mcp``: the Model Context Protocol over streamable HTTP (docs/mcp.md), for callers with an API key.

There are no sessions: each POST is one request. A refusal by HTTP (credential, limits, size, media type, method) has
the API's envelope, a refusal by JSON-RPC its error object, and a refusal by a tool is a result with ``isError``.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from decimal import Decimal
from typing import Any, Self
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from config.api import live
from config.api.errors import envelope, to_domain_error
from config.api.negotiation import check_media_type
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import DomainError, Forbidden
from config.kernel.jsontext import dumps
from config.limits.lease import Lease
from runs.events import StreamType
from runs.mcp import protocol
from runs.mcp.protocol import Message, RpcError, error_of, id_of, read_body, read_message, result_of
from runs.mcp.tools import TOOLS, WAIT_MAX_SECONDS, Started, call_tool, run_shown
from runs.models import Awaiting, RunStatus
from runs.streams.hub import Hub
from runs.streams.reads import Event

# The most MCP calls of one user that wait for a run at the same time, in all processes together; one more gets 429.
MCP_WAITS_PER_USER = 4
# The places of each user, over all processes. Their lease leaves some time for the answer after the wait.
places = Lease(
    "mcp-waits", WAIT_MAX_SECONDS + 10.0, "You have too many calls that wait; use waitSeconds 0, or try again later."
)

logger = logging.getLogger(__name__)

ABOUT = {
    "capabilities": {"tools": {"listChanged": False}},
    "instructions": "Runs AI agents in chats. Create a chat, start a run in it with a message, and read its answer. "
    "A run whose status is waiting needs an answer to its pendingWaitpoint before it continues.",
}
# The tools never change within a release.
CACHED = {"ttlMs": 3_600_000, "cacheScope": "public"}


@extend_schema(exclude=True)
class McpViewSet(ServiceViewSet):
    surface = "public"
    required_scopes = {"handle": ""}  # a call checks the scope of its tool
    parser_classes = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # Pages of other sites could reach a service on a private network through the user's browser.
        origin, own = request.headers.get("Origin"), urlsplit(settings.BASE_URL)
        if origin not in (None, f"{own.scheme}://{own.netloc}", *settings.MCP_ALLOWED_ORIGINS):
            raise Forbidden("This origin may not call the MCP endpoint.")
        super().initial(request, *args, **kwargs)

    def check_query(self, request: Request) -> None:
        """Accept any query parameters: the protocol does not use them, and some clients have one in their address."""

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[Any, str]:
        # A client that opens a stream with GET must get 405, whatever media type it accepts.
        return super().perform_content_negotiation(request, force or request.method != "POST")

    def handle(self, request: Request) -> HttpResponseBase:
        check_media_type(request.content_type)
        message = identifier = None
        try:
            body = read_body(request._request.body)
            identifier = id_of(body)
            message = read_message(body, request.headers)
            if message is None:
                return HttpResponse(status=202, content_type="application/json")
            if message.method == "tools/call":
                return self.call(message, request)
            return rpc_response(result_of(message, answer(message)))
        except RpcError as error:
            status = 404 if error.code == protocol.METHOD_NOT_FOUND else 400
            return rpc_response(error_of(identifier, error), status if message is None or message.modern else 200)

    def call(self, message: Message, request: Request) -> HttpResponseBase:
        name, arguments = message.params.get("name"), message.params.get("arguments", {})
        if not isinstance(name, str) or name not in TOOLS:
            raise RpcError(protocol.INVALID_PARAMS, "There is no tool of this name.")
        if not isinstance(arguments, dict):
            raise RpcError(protocol.INVALID_PARAMS, "arguments must be an object.")
        user_id: Any = request.user.pk
        with ExitStack() as frees:
            place, seconds = "", arguments.get("waitSeconds")
            # Taken before the run starts: a refused client repeats the call.
            if TOOLS[name].starts_run and isinstance(seconds, (int, float, Decimal)) and seconds > 0:
                place = places.take(user_id, MCP_WAITS_PER_USER)
                frees.callback(places.free, place)
            result = outcome(lambda: call_tool(name, request, arguments))
            if not isinstance(result, Started):
                return rpc_response(result_of(message, result))
            frees.pop_all()
        wait = Wait(result, place, lambda: dumps(waited(message, request, result)))
        live.offer(request, wait.open)
        return StreamingHttpResponse(wait.at_once(), content_type="application/json")


def answer(message: Message) -> dict[str, Any]:
    """The result of a method that calls no tool. Raises RpcError."""
    match message.method, message.modern:
        case "tools/list", modern:
            return {"tools": [tool.listing(name) for name, tool in TOOLS.items()]} | (CACHED if modern else {})
        case "server/discover", True:
            return {"supportedVersions": protocol.VERSIONS} | ABOUT | CACHED
        case "initialize", False:
            # A client that asks for an unknown revision is offered the newest of LEGACY.
            asked = message.params.get("protocolVersion")
            version = asked if asked in protocol.LEGACY else protocol.LEGACY[0]
            return {"protocolVersion": version, "serverInfo": protocol.SERVER} | ABOUT
        case "ping", False:
            return {}
    raise RpcError(protocol.METHOD_NOT_FOUND, f"There is no method {message.method[:100]}.")


def outcome(work: Callable[[], Any]) -> Any:
    """A tool's result in MCP's format; a refusal is a result with ``isError``. Faults of the service are raised."""
    try:
        value = work()
    except Exception as error:
        refusal = error if isinstance(error, DomainError) else to_domain_error(error)
        if refusal.status >= 500:
            raise
        return content(envelope(refusal.code, refusal.message, refusal.details)) | {"isError": True}
    return value if isinstance(value, Started) else content(value) | {"isError": False}


def content(value: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": dumps(value).decode()}], "structuredContent": value}


def rpc_response(message: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(dumps(message), status=status, content_type="application/json")


def waited(message: Message, request: Request, started: Started) -> dict[str, Any]:
    """The answer to a call after its wait. The HTTP status is sent already, so a fault is an error of JSON-RPC."""
    run_id = started.opening.run_id
    try:
        return result_of(message, outcome(lambda: run_shown(request, run_id)))
    except Exception:
        logger.exception("the run %s could not be read after waiting", run_id)
        fault = RpcError(protocol.INTERNAL_ERROR, "Something went wrong on our side; look at the run with get_run.")
        return error_of(message.id, fault)


class Wait:
    """Ends when the run has ended, waits for an answer or awaits the caller's app, or when its time is over. Until then
    it holds no thread and no database connection. ``answer`` returns the body after the wait, on a thread.
    """

    def __init__(self, started: Started, place: str, answer: Callable[[], bytes]) -> None:
        self.started, self.place, self.answer = started, place, answer
        self.over = False

    def at_once(self) -> Iterator[bytes]:
        """The body for servers other than ours, which do not wait."""
        places.free(self.place)
        yield self.answer()

    def open(self) -> Self:
        self.stream = Hub.open().join(self.started.opening)
        self.close = self.stream.close
        return self

    async def next(self) -> bytes | None:
        if self.over:
            return None
        self.over = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.started.wait_seconds):
                while (batch := await self.stream.next()) is not None and not any(map(ends_wait, batch)):
                    pass
        return await self.stream.hub.ask(self.answer)

    def leave(self) -> None:
        self.stream.leave()
        places.free(self.place)


def ends_wait(event: Event) -> bool:
    if event.type == StreamType.TOOL_PARKED:
        return json.loads(event.data)["awaiting"] == Awaiting.CLIENT
    is_status = event.type == StreamType.RUN_STATUS
    return event.final or (is_status and json.loads(event.data)["status"] == RunStatus.WAITING)
