"""JSON-RPC 2.0 as the Model Context Protocol uses it, without tools and runs. Each refusal is an ``RpcError``."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from config.kernel.jsontext import MalformedJSON, parse_value

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


class RpcError(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


@dataclass(frozen=True)
class Message:
    """A JSON-RPC request, in the revision MODERN or one of LEGACY."""

    id: str | int
    method: str
    params: dict[str, Any]
    modern: bool


def read_body(raw: bytes) -> Any:
    """The JSON value of a body. Raises RpcError."""
    try:
        return parse_value(raw)
    except MalformedJSON as error:
        raise RpcError(PARSE_ERROR, error.message) from None


def id_of(body: Any) -> str | int | None:
    """The id of the message; None if it has none, or none that is valid."""
    given = body.get("id") if isinstance(body, dict) else None
    return given if isinstance(given, (str, int)) and not isinstance(given, bool) else None


def read_message(body: Any, headers: Mapping[str, str]) -> Message | None:
    """The request, with its revision; None for a notification. Raises RpcError, also for a batch."""
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0" or not isinstance(body.get("method"), str):
        raise RpcError(INVALID_REQUEST, "The body must be one JSON-RPC 2.0 request or notification.")
    if "id" not in body:
        return None
    if (identifier := id_of(body)) is None:
        raise RpcError(INVALID_REQUEST, "id must be text or a whole number.")
    params, version = body.get("params", {}), headers.get(VERSION_HEADER)
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params must be an object.")
    meta = params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    if VERSION_KEY in meta or version == MODERN:
        _check_modern(body["method"], params, meta, headers)
    elif version is not None and version not in LEGACY:
        raise _unsupported(version)
    return Message(identifier, body["method"], params, modern=version == MODERN)


def _check_modern(method: str, params: dict[str, Any], meta: dict[str, Any], headers: Mapping[str, str]) -> None:
    """In MODERN every request names its version and capabilities, and its headers must repeat values of the body."""
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise RpcError(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}.")
    expected = {VERSION_HEADER: meta[VERSION_KEY], "Mcp-Method": method}
    if method == "tools/call":
        expected["Mcp-Name"] = params.get("name")
    for name, value in expected.items():
        if decode_header(headers.get(name)) != value:
            raise RpcError(HEADER_MISMATCH, f"The header {name} does not agree with the body.")
    if meta[VERSION_KEY] != MODERN:
        raise _unsupported(meta[VERSION_KEY])


def _unsupported(version: Any) -> RpcError:
    data = {"supported": VERSIONS, "requested": version}
    return RpcError(UNSUPPORTED_VERSION, "This protocol version is not served.", data)


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
