"""``/api/mcp``: the Model Context Protocol over streamable HTTP (docs/mcp.md), for callers with an API key.

There are no sessions: each POST is one request. A refusal by HTTP (credential, limits, size, media type, method) has
the API's envelope, a refusal by JSON-RPC its error object, and a refusal by a tool is a result with ``isError``.
"""

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import Callable, Iterator, Mapping
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
from config.kernel.errors import Forbidden
from config.kernel.jsontext import MalformedJSON, dumps, parse_value
from config.limits.lease import Lease
from runs.events import StreamType
from runs.mcp.tools import TOOLS, WAIT_MAX_SECONDS, call_tool, run_shown
from runs.models import Awaiting, RunStatus
from runs.streams.hub import Hub, Opening
from runs.streams.reads import Event

MODERN = "2026-07-28"
# The revisions with a handshake, newest first. A request without a version is treated as one of these.
LEGACY = ["2025-11-25", "2025-06-18", "2025-03-26"]
VERSIONS = [MODERN, *LEGACY]
VERSION_HEADER = "MCP-Protocol-Version"
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
SERVER = {"name": "agent-workflow-service", "title": "Agent workflow service", "version": "1.0.0"}

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022
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
CACHED = {"ttlMs": 3_600_000, "cacheScope": "public"}  # the tools never change within a release


# --- JSON-RPC ---------------------------------------------------------------------------------------------------------


class RpcError(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


def id_of(body: Any) -> str | int | None:
    """The id of the message; None if it has none, or none that is valid."""
    given = body.get("id") if isinstance(body, dict) else None
    return given if isinstance(given, (str, int)) and not isinstance(given, bool) else None


class Message:
    """A JSON-RPC request, in the revision MODERN or one of LEGACY."""

    def __init__(self, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        """Raises RpcError."""
        self.id, self.method, self.params = id_of(body), body["method"], body.get("params", {})
        if self.id is None:
            raise RpcError(INVALID_REQUEST, "id must be text or a whole number.")
        if not isinstance(self.params, dict):
            raise RpcError(INVALID_PARAMS, "params must be an object.")
        meta, version = self.params.get("_meta"), headers.get(VERSION_HEADER)
        meta = meta if isinstance(meta, dict) else {}
        self.modern = VERSION_KEY in meta or version == MODERN
        if self.modern:
            # Every request names its version and capabilities, and its headers repeat values of the body.
            missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
            if missing:
                raise RpcError(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}.")
            expected = {VERSION_HEADER: meta[VERSION_KEY], "Mcp-Method": self.method}
            if self.method == "tools/call":
                expected["Mcp-Name"] = self.params.get("name")
            for name, value in expected.items():
                if decode_header(headers.get(name)) != value:
                    raise RpcError(HEADER_MISMATCH, f"The header {name} does not agree with the body.")
        asked = meta[VERSION_KEY] if self.modern else version
        if asked not in ([MODERN] if self.modern else [None, *LEGACY]):
            data = {"supported": VERSIONS, "requested": asked}
            raise RpcError(UNSUPPORTED_VERSION, "This protocol version is not served.", data)


def decode_header(value: str | None) -> str | None:
    """The text of a header, decoded if it has the form ``=?base64?…?=``. None if it is malformed."""
    if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    try:
        return base64.b64decode(value[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def result_of(message: Message, result: dict[str, Any]) -> dict[str, Any]:
    if message.modern:
        result = result | {"resultType": "complete", "_meta": {SERVER_KEY: SERVER}}
    return {"jsonrpc": "2.0", "id": message.id, "result": result}


def error_of(identifier: str | int | None, error: RpcError) -> dict[str, Any]:
    shown = {"code": error.code, "message": error.message} | ({"data": error.data} if error.data is not None else {})
    return {"jsonrpc": "2.0", "id": identifier, "error": shown}


# --- the endpoint -----------------------------------------------------------------------------------------------------


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
            body = parse_value(request._request.body)
            identifier = id_of(body)
            # A batch is refused, too.
            if not isinstance(body, dict) or body.get("jsonrpc") != "2.0" or not isinstance(body.get("method"), str):
                raise RpcError(INVALID_REQUEST, "The body must be one JSON-RPC 2.0 request or notification.")
            if "id" not in body:  # a notification
                return HttpResponse(status=202, content_type="application/json")
            message = Message(body, request.headers)
            if message.method == "tools/call":
                return self.call(message, request)
            return rpc_response(result_of(message, answer(message)))
        except MalformedJSON as error:
            return rpc_response(error_of(None, RpcError(PARSE_ERROR, error.message)), 400)
        except RpcError as error:
            status = 404 if error.code == METHOD_NOT_FOUND else 400
            return rpc_response(error_of(identifier, error), status if message is None or message.modern else 200)

    def call(self, message: Message, request: Request) -> HttpResponseBase:
        name, arguments = message.params.get("name"), message.params.get("arguments", {})
        if not isinstance(name, str) or name not in TOOLS:
            raise RpcError(INVALID_PARAMS, "There is no tool of this name.")
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments must be an object.")
        user_id: Any = request.user.pk
        seconds: Any = arguments.get("waitSeconds")
        with ExitStack() as frees:
            place = ""
            # Taken before the run starts: a refused client repeats the call.
            if TOOLS[name].starts_run and isinstance(seconds, (int, float, Decimal)) and seconds > 0:
                place = places.take(user_id, MCP_WAITS_PER_USER)
                frees.callback(places.free, place)
            result = outcome(lambda: call_tool(name, request, arguments))
            if not isinstance(result, Opening):
                return rpc_response(result_of(message, result))
            frees.pop_all()
        wait = Wait(result, float(seconds), place, lambda: dumps(waited(message, request, result.run_id)))
        live.offer(request, wait.open)
        return StreamingHttpResponse(wait.at_once(), content_type="application/json")


def answer(message: Message) -> dict[str, Any]:
    """The result of a method that calls no tool. Raises RpcError."""
    match message.method, message.modern:
        case "tools/list", modern:
            return {"tools": [tool.listing(name) for name, tool in TOOLS.items()]} | (CACHED if modern else {})
        case "server/discover", True:
            return {"supportedVersions": VERSIONS} | ABOUT | CACHED
        case "initialize", False:
            # A client that asks for an unknown revision is offered the newest of LEGACY.
            asked = message.params.get("protocolVersion")
            version = asked if asked in LEGACY else LEGACY[0]
            return {"protocolVersion": version, "serverInfo": SERVER} | ABOUT
        case "ping", False:
            return {}
    raise RpcError(METHOD_NOT_FOUND, f"There is no method {message.method[:100]}.")


def outcome(work: Callable[[], Any]) -> Any:
    """A tool's result in MCP's format; a refusal is a result with ``isError``. Faults of the service are raised."""
    try:
        value = work()
    except Exception as error:
        refusal = to_domain_error(error)
        if refusal.status >= 500:
            raise
        return content(envelope(refusal.code, refusal.message, refusal.details)) | {"isError": True}
    return value if isinstance(value, Opening) else content(value) | {"isError": False}


def content(value: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": dumps(value).decode()}], "structuredContent": value}


def rpc_response(message: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(dumps(message), status=status, content_type="application/json")


def waited(message: Message, request: Request, run_id: str) -> dict[str, Any]:
    """The answer to a call after its wait. The HTTP status is sent already, so a fault is an error of JSON-RPC."""
    try:
        return result_of(message, outcome(lambda: run_shown(request, run_id)))
    except Exception:
        logger.exception("the run %s could not be read after waiting", run_id)
        fault = RpcError(INTERNAL_ERROR, "Something went wrong on our side; look at the run with get_run.")
        return error_of(message.id, fault)


class Wait:
    """Ends when the run has ended, waits for an answer or awaits the caller's app, or when its time is over. Until then
    it holds no thread and no database connection. ``answer`` returns the body after the wait, on a thread.
    """

    def __init__(self, opening: Opening, seconds: float, place: str, answer: Callable[[], bytes]) -> None:
        self.opening, self.seconds, self.place, self.answer = opening, seconds, place, answer
        self.over = False

    def at_once(self) -> Iterator[bytes]:
        """The body for servers other than ours, which do not wait."""
        places.free(self.place)
        yield self.answer()

    def open(self) -> Self:
        self.stream = Hub.open().join(self.opening)
        self.close = self.stream.close
        return self

    async def next(self) -> bytes | None:
        if self.over:
            return None
        self.over = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
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
