"""JSON-RPC 2.0 as the Model Context Protocol uses it: reading requests, settling their revision, writing answers.

This module does not use tools, runs or Django's views. Each refusal is an ``RpcError``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from config.kernel.jsontext import MalformedJSON, dumps, parse_value

MODERN = "2026-07-28"
# The revisions with a handshake, newest first. A request without a version is of the oldest, which alone has batches.
LEGACY = ["2025-11-25", "2025-06-18", "2025-03-26"]
VERSIONS = [MODERN, *LEGACY]
VERSION_HEADER = "MCP-Protocol-Version"
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
SERVER = {"name": "agent-workflow-service", "title": "Agent Workflow Service", "version": "1.0.0"}

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022


class RpcError(Exception):
    """A JSON-RPC error. ``status`` is the HTTP status in the revision MODERN, and with ``always`` in all revisions."""

    def __init__(self, code: int, message: str, data: Any = None, *, status: int = 400, always: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.data, self.status, self.always = code, message, data, status, always


@dataclass(frozen=True)
class Message:
    """A JSON-RPC request, in the revision MODERN or one of LEGACY."""

    id: str | int
    method: str
    params: dict[str, Any]
    modern: bool

    @property
    def progress_token(self) -> str | int | None:
        meta = self.params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        return token if is_id(token) else None


def read_body(raw: bytes) -> Any:
    """The JSON value of a body: a batch is a list. Raises RpcError."""
    try:
        return parse_value(raw)
    except MalformedJSON as error:
        raise RpcError(PARSE_ERROR, error.message, always=True) from None


def check_batch(batch: list[Any], headers: Mapping[str, str], most: int) -> None:
    """Raises RpcError if this is no batch that the revision allows, or has more than ``most`` members."""
    if headers.get(VERSION_HEADER, LEGACY[-1]) != LEGACY[-1]:
        raise RpcError(INVALID_REQUEST, f"Only the revision {LEGACY[-1]} has batches.", always=True)
    if not 1 <= len(batch) <= most:
        raise RpcError(INVALID_REQUEST, f"A batch has 1 to {most} members.", always=True)
    if any(isinstance(body, dict) and body.get("method") == "initialize" for body in batch):
        raise RpcError(INVALID_REQUEST, "initialize must not be part of a batch.", always=True)


def check_shape(body: Any) -> None:
    """Raises RpcError if this is no JSON-RPC request or notification."""
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0" or not isinstance(body.get("method"), str):
        raise RpcError(INVALID_REQUEST, "The body must be a JSON-RPC 2.0 request or notification.", always=True)


def read_message(body: dict[str, Any], headers: Mapping[str, str]) -> Message:
    """The request with its revision. Raises RpcError."""
    identifier, params = body["id"], body.get("params", {})
    if not is_id(identifier):
        raise RpcError(INVALID_REQUEST, "id must be text or a whole number.", always=True)
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params must be an object.", always=True)
    version = headers.get(VERSION_HEADER)
    meta = params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    if VERSION_KEY in meta or version == MODERN:
        check_modern(body["method"], params, meta, headers)
    elif version is not None and version not in LEGACY:
        raise unsupported(version)
    return Message(identifier, body["method"], params, modern=version == MODERN)


def check_modern(method: str, params: dict[str, Any], meta: dict[str, Any], headers: Mapping[str, str]) -> None:
    """In MODERN every request names its version and capabilities, and its headers repeat what the body says."""
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise RpcError(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}.", always=True)
    version = meta[VERSION_KEY]
    expected = {VERSION_HEADER: version, "Mcp-Method": method}
    if method == "tools/call":
        expected["Mcp-Name"] = params.get("name")
    for name, value in expected.items():
        if decode_header(headers.get(name)) != value:
            raise RpcError(HEADER_MISMATCH, f"The header {name} does not agree with the body.", always=True)
    if version != MODERN:
        raise unsupported(version)


def unsupported(version: Any) -> RpcError:
    data = {"supported": VERSIONS, "requested": version}
    return RpcError(UNSUPPORTED_VERSION, "This protocol version is not served.", data, always=True)


def decode_header(value: str | None) -> str | None:
    """The text of a header, decoded if it has the form ``=?base64?…?=``. None if it is malformed."""
    if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    try:
        return base64.b64decode(value[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def is_id(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def result_of(message: Message, result: dict[str, Any]) -> dict[str, Any]:
    if message.modern:
        result = result | {"resultType": "complete", "_meta": {SERVER_KEY: SERVER}}
    return {"jsonrpc": "2.0", "id": message.id, "result": result}


def error_of(body: Any, error: RpcError) -> dict[str, Any]:
    """The answer to the request ``body``, of which anything may be wrong."""
    identifier = body.get("id") if isinstance(body, dict) else None
    shown = {"code": error.code, "message": error.message} | ({"data": error.data} if error.data is not None else {})
    return {"jsonrpc": "2.0", "id": identifier if is_id(identifier) else None, "error": shown}


def progress(token: str | int, step: int, text: str) -> dict[str, Any]:
    """A notification of progress; ``step`` must grow from one to the next."""
    params = {"progressToken": token, "progress": step, "message": text}
    return {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}


def sse(message: dict[str, Any]) -> bytes:
    """``message`` as a server-sent event."""
    return b"event: message\ndata: " + dumps(message) + b"\n\n"
