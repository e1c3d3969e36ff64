"""Helpers that call /api/mcp with raw JSON-RPC, in all revisions of the protocol."""

import json
from typing import Any

from rest_framework.test import APIClient

URL = "/api/mcp"
MODERN, LEGACY, OLDEST = "2026-07-28", "2025-11-25", "2025-03-26"
HANDSHAKES = [LEGACY, "2025-06-18", OLDEST]
VERSIONS = [MODERN, *HANDSHAKES]
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
ENVELOPE = {VERSION_KEY: MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
# Each tool with the scope that it needs.
TOOLS = {
    "list_chats": "chats:read",
    "create_chat": "chats:write",
    "start_run": "runs:write",
    "get_run": "runs:read",
    "cancel_run": "runs:write",
    "respond_to_waitpoint": "waitpoints:respond",
    "submit_tool_result": "runs:write",
    "get_credits": "credits:read",
}


def post(client: APIClient, body: Any, **headers: str) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.generic(
        "POST", URL, raw, content_type=headers.pop("content_type", "application/json"), headers=headers
    )


def rpc(client: APIClient, method: str, params: dict[str, Any] | None = None, **headers: str) -> Any:
    """Send a request of an older revision."""
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
    return post(client, body, **{"MCP-Protocol-Version": LEGACY, **headers})


def modern(client: APIClient, method: str, params: dict[str, Any] | None = None, **headers: str) -> Any:
    """Send a request of the newer revision. ``headers`` override the default headers."""
    params = {"_meta": ENVELOPE, **(params or {})}
    own = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
    if method == "tools/call":
        own["Mcp-Name"] = str(params.get("name"))
    sent = {name: value for name, value in (own | headers).items() if value}
    return post(client, {"jsonrpc": "2.0", "id": "a", "method": method, "params": params}, **sent)


def call(client: APIClient, name: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool in the older revision, and return its result. The newer revision only adds fields to it."""
    response = rpc(client, "tools/call", {"name": name, "arguments": arguments})
    assert response.status_code == 200
    body = json.loads(response.getvalue())
    assert (body["jsonrpc"], body["id"]) == ("2.0", 1)
    result = body["result"]
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    return result


def done(client: APIClient, name: str, **arguments: Any) -> Any:
    result = call(client, name, **arguments)
    assert result["isError"] is False, result
    return result["structuredContent"]


def refused(client: APIClient, name: str, **arguments: Any) -> dict[str, Any]:
    result = call(client, name, **arguments)
    assert result["isError"] is True, result
    error: dict[str, Any] = result["structuredContent"]["error"]
    return error


def error_of(response: Any, status: int, code: int) -> dict[str, Any]:
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/json"
    body = response.json()
    assert set(body) == {"jsonrpc", "id", "error"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    return body
