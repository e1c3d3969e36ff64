"""``python -m tests.tools.mcp_server PORT [legacy]``: an MCP server that uses the official SDK.

Its tools cover the kinds of results. With ``legacy`` it refuses the newest revision of the protocol.
"""

from __future__ import annotations

import asyncio
import json
import sys
from base64 import b64encode
from typing import Any

import uvicorn
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

PNG = b"\x89PNG\r\n\x1a\nimage"
server = MCPServer("test tools")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(name="remote.name")
def named() -> str:
    """Has a name that the catalogue does not allow."""
    return "by its own name"


@server.tool()
def headers(ctx: Context[Any, Any]) -> str:
    """Returns the headers of the call."""
    request = ctx.request_context.request
    assert request is not None
    return json.dumps(dict(request.headers))


@server.tool()
def report() -> CallToolResult:
    return CallToolResult(
        content=[
            TextContent(type="text", text="Here it is."),
            ResourceLink(type="resource_link", name="chart", uri="https://files.example/chart.svg"),
            ResourceLink(type="resource_link", name="note", uri="note://1"),
            ImageContent(type="image", data="aGk=", mime_type="image/png"),
            ImageContent(type="image", data=b64encode(PNG).decode(), mime_type="image/png"),
            EmbeddedResource(
                type="resource",
                resource=BlobResourceContents(uri="file://a", mime_type="image/png", blob=b64encode(PNG).decode()),
            ),
        ]
    )


@server.tool()
def refuse(reason: str) -> None:
    raise MCPError(-32000, reason)


@server.tool()
def fail(reason: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=reason)], is_error=True)


@server.tool()
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "at last"


@server.tool()
async def with_progress(ctx: Context[Any, Any]) -> str:
    """Reports progress before the result, so that the answer is a stream."""
    await ctx.report_progress(1, 2)
    return "streamed"


@server.tool()
def large(size: int) -> str:
    return "x" * size


class Legacy:
    """Middleware that refuses requests of the newest revision, as an older server does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (b"mcp-protocol-version", b"2026-07-28") in scope.get("headers", ()):
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"Bad Request: Unsupported protocol version"})
            return
        await self.app(scope, receive, send)


if __name__ == "__main__":
    app: Any = server.streamable_http_app()
    if "legacy" in sys.argv:
        app = Legacy(app)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
