"""``/api/mcp``: the Model Context Protocol over streamable HTTP (docs/mcp.md), for callers with an API key.

Without sessions: each POST is a request of its own, in the revision 2026-07-28 or 2025-11-25. What HTTP itself refuses
(credential, limits, size, media type, method) is answered with the API's envelope, what JSON-RPC refuses with its
error object, and what a tool refuses with a result that says ``isError``.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from config.api.errors import envelope, to_domain_error
from config.api.parsers import check_media_type, load_body
from config.api.viewsets import PublicViewSet
from config.kernel.errors import DomainError, Forbidden
from config.kernel.jsontext import MalformedJSON, dumps, parse_value
from runs.mcp.tools import TOOLS, Caller, Started, after_waiting, call_tool
from runs.mcp.wait import Progress, follow

logger = logging.getLogger(__name__)

MODERN, LEGACY = "2026-07-28", "2025-11-25"
VERSIONS = [MODERN, LEGACY]
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
SERVER = {"name": "agent-workflow-service", "title": "Agent Workflow Service", "version": "1.0.0"}
INSTRUCTIONS = (
    "Runs AI agents in chats. Create a chat, start a run in it with a message, and read its answer. A run whose status "
    "is waiting needs an answer to its pendingWaitpoint before it goes on."
)
# The tools of a release never change.
LIST_TTL_MS = 3_600_000
EVENT_STREAM = "text/event-stream"

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022


class RpcError(Exception):
    """A JSON-RPC error. ``status`` is HTTP's in the revision MODERN, and in any if the message itself is no request."""

    def __init__(self, code: int, message: str, data: Any = None, *, status: int = 400, always: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.data, self.status, self.always = code, message, data, status, always


@dataclass(frozen=True)
class Message:
    """A JSON-RPC request; ``modern`` in the revision MODERN."""

    id: str | int
    method: str
    params: dict[str, Any]
    modern: bool

    @property
    def progress_token(self) -> str | int | None:
        meta = self.params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        return token if isinstance(token, (str, int)) and not isinstance(token, bool) else None


@extend_schema(exclude=True)
class McpViewSet(PublicViewSet):
    required_scopes = {"handle": ""}  # each tool's own is checked when it is called
    parser_classes = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        check_origin(request.headers.get("Origin"))
        super().initial(request, *args, **kwargs)

    def handle(self, request: Request) -> HttpResponseBase:
        check_media_type(request.content_type)
        request_id: Any = None
        modern = request.headers.get("MCP-Protocol-Version") == MODERN
        try:
            body = read_body(load_body(request._request))
            if "id" not in body:
                return HttpResponse(status=202, content_type="application/json")
            request_id = body["id"]
            message = read_message(body, request)
            modern = message.modern
            return self.answer(message, request)
        except RpcError as error:
            status = error.status if modern or error.always else 200
            return rpc_response(error_of(request_id, error.code, error.message, error.data), status)

    def answer(self, message: Message, request: Request) -> HttpResponseBase:
        if message.method == "tools/call":
            return self.call(message, request)
        method = METHODS[message.modern].get(message.method)
        if method is None:
            raise RpcError(METHOD_NOT_FOUND, f"There is no method {message.method[:100]}.", status=404)
        return rpc_response(result_of(message, method(message.params)))

    def call(self, message: Message, request: Request) -> HttpResponseBase:
        name, arguments = message.params.get("name"), message.params.get("arguments", {})
        tool = TOOLS.get(name) if isinstance(name, str) else None
        if tool is None:
            raise RpcError(INVALID_PARAMS, "There is no tool of this name.")
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments must be an object.")
        key: Any = request.auth
        caller = Caller(request.user, key, request._request)
        result = outcome(lambda: call_tool(tool, caller, arguments))
        if not isinstance(result, Started):
            return rpc_response(result_of(message, result))
        started = result
        token = message.progress_token
        if token is not None and started.wait_seconds and accepts_streams(request):
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            frames = stream(message, token, caller, started)
            return StreamingHttpResponse(frames, content_type=EVENT_STREAM, headers=headers)
        for _ in follow(started.opening, started.wait_seconds):
            pass
        return rpc_response(result_of(message, outcome(lambda: after_waiting(caller, started.run.pk))))


# --- the request -----------------------------------------------------------------------------------------------------
def check_origin(origin: str | None) -> None:
    """A page of another site must not reach a service on this machine or network by way of the user's browser."""
    if origin is None:
        return
    own = urlsplit(settings.BASE_URL)
    if origin != f"{own.scheme}://{own.netloc}" and origin not in settings.MCP_ALLOWED_ORIGINS:
        raise Forbidden("This origin may not call the MCP endpoint.")


def accepts_streams(request: Request) -> bool:
    accepted = [part.split(";")[0].strip().lower() for part in request.headers.get("Accept", "*/*").split(",")]
    return bool({EVENT_STREAM, "text/*", "*/*"} & set(accepted))


def read_body(raw: bytes) -> dict[str, Any]:
    """One JSON-RPC request or notification. Raises RpcError."""
    try:
        body = parse_value(raw)
    except MalformedJSON as error:
        raise RpcError(PARSE_ERROR, error.message, always=True) from None
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0" or not isinstance(body.get("method"), str):
        raise RpcError(INVALID_REQUEST, "The body must be one JSON-RPC 2.0 request or notification.", always=True)
    return body


def read_message(body: dict[str, Any], request: Request) -> Message:
    """The request, its revision settled. Raises RpcError."""
    identifier, params = body["id"], body.get("params", {})
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise RpcError(INVALID_REQUEST, "id must be text or a whole number.", always=True)
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params must be an object.", always=True)
    header = request.headers.get("MCP-Protocol-Version")
    meta = params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    if VERSION_KEY in meta or header == MODERN:
        check_modern(body["method"], params, meta, request)
    elif header is not None and header != LEGACY:
        raise unsupported(header)
    return Message(identifier, body["method"], params, modern=header == MODERN)


def check_modern(method: str, params: dict[str, Any], meta: dict[str, Any], request: Request) -> None:
    """The envelope of MODERN: what every request says of itself, and headers that say the same."""
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise RpcError(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}.", always=True)
    version = meta[VERSION_KEY]
    told = {"MCP-Protocol-Version": version, "Mcp-Method": method}
    if method == "tools/call":
        told["Mcp-Name"] = params.get("name")
    for name, value in told.items():
        if decode_header(request.headers.get(name)) != value:
            raise RpcError(HEADER_MISMATCH, f"The header {name} does not agree with the body.", always=True)
    if version != MODERN:
        raise unsupported(version)


def unsupported(version: Any) -> RpcError:
    data = {"supported": VERSIONS, "requested": version}
    return RpcError(UNSUPPORTED_VERSION, "This protocol version is not served.", data, always=True)


def decode_header(value: str | None) -> str | None:
    """A header's text, which may come as ``=?base64?…?=``. None if it is malformed."""
    if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    try:
        return base64.b64decode(value[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


# --- the methods -----------------------------------------------------------------------------------------------------
def initialize(params: dict[str, Any]) -> dict[str, Any]:
    """The handshake of LEGACY; whoever asks for another revision is offered that one."""
    return {
        "protocolVersion": LEGACY,
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": SERVER,
        "instructions": INSTRUCTIONS,
    }


def discover(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "supportedVersions": VERSIONS,
        "capabilities": {"tools": {"listChanged": False}},
        "instructions": INSTRUCTIONS,
        "ttlMs": LIST_TTL_MS,
        "cacheScope": "public",
    }


def list_tools(params: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [tool.listed() for tool in TOOLS.values()]}


def list_tools_modern(params: dict[str, Any]) -> dict[str, Any]:
    return list_tools(params) | {"ttlMs": LIST_TTL_MS, "cacheScope": "public"}


# By whether the revision is MODERN.
METHODS: dict[bool, dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    True: {"server/discover": discover, "tools/list": list_tools_modern},
    False: {"initialize": initialize, "ping": lambda params: {}, "tools/list": list_tools},
}


# --- the answer ------------------------------------------------------------------------------------------------------
def outcome(work: Callable[[], Any]) -> Any:
    """A tool's result as MCP has it, a refusal as one with ``isError``; what is our own fault goes through."""
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


def result_of(message: Message, result: dict[str, Any]) -> dict[str, Any]:
    if message.modern:
        result = result | {"resultType": "complete", "_meta": {SERVER_KEY: SERVER}}
    return {"jsonrpc": "2.0", "id": message.id, "result": result}


def error_of(identifier: Any, code: int, message: str, data: Any = None) -> dict[str, Any]:
    usable = isinstance(identifier, (str, int)) and not isinstance(identifier, bool)
    error = {"code": code, "message": message} | ({"data": data} if data is not None else {})
    return {"jsonrpc": "2.0", "id": identifier if usable else None, "error": error}


def rpc_response(message: dict[str, Any], status: int = 200) -> HttpResponse:
    return HttpResponse(dumps(message), status=status, content_type="application/json")


def stream(message: Message, token: str | int, caller: Caller, started: Started) -> Iterator[bytes]:
    """What happens to the run as progress, then the result. A client that goes away leaves the run alone."""
    with closing(follow(started.opening, started.wait_seconds)) as events:
        for event in events:
            yield b": keep-alive\n\n" if event is None else sse(progress(token, event))
    try:
        answer = result_of(message, outcome(lambda: after_waiting(caller, started.run.pk)))
    except Exception:
        logger.exception("the run %s could not be read after waiting", started.run.pk)
        answer = error_of(message.id, INTERNAL_ERROR, "Something went wrong on our side; look at the run with get_run.")
    yield sse(answer)


def sse(message: dict[str, Any]) -> bytes:
    return b"event: message\ndata: " + dumps(message) + b"\n\n"


def progress(token: str | int, event: Progress) -> dict[str, Any]:
    """The event's index grows with each, as progress must."""
    said = event.data.get("status") or event.data.get("kind") or ""
    text = " ".join(filter(None, (event.type, str(event.data.get("name") or ""), said)))
    params = {"progressToken": token, "progress": event.index, "message": text}
    return {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
