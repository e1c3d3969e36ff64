"""One call of a tool of an MCP server, with the official SDK. Imported on the first call of such a tool; ``mcp`` says
where it runs.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx2
from django.conf import settings
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CallToolResult,
    EmbeddedResource,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from config.outbound.client import check_url
from runs.tools.base import TOOL_ERROR, ToolContext, ToolDefinition, ToolFailure, ToolResult, is_web_address
from runs.tools.mcp.transport import GuardedTransport
from runs.tools.outbound import USER_AGENT

logger = logging.getLogger(__name__)

# A server may list its tools on pages; one that never ends is not gone through.
LIST_PAGES_MAX = 20


async def call(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Raises ToolFailure. The time limit is the caller's, who cancels."""
    transport = GuardedTransport(
        allow_private=settings.OUTBOUND_ALLOW_PRIVATE, max_bytes=settings.TOOL_ANSWER_MAX_BYTES
    )
    name = definition.remote_name or definition.name
    result: CallToolResult | None = None
    try:
        check_url(definition.url, allow_private=True)  # its form; the address is checked when connecting
        async with http_client(definition, context, transport) as http:
            streams = streamable_http_client(
                definition.url, http_client=http, max_sse_event_size=settings.TOOL_ANSWER_MAX_BYTES
            )
            async with Client(
                streams, client_info=Implementation(name=USER_AGENT, version="1.0.0"), cache=None
            ) as client:
                await find_tool(client, definition, name)
                result = await client.call_tool(name, input)
    except Exception as error:
        # A failure while taking leave loses nothing.
        if result is None:
            raise failure_of(definition, transport, error) from None
    if result is None:
        raise ToolFailure(TOOL_ERROR, f"{definition.name} did not answer.")
    return read_result(definition, result)


def http_client(definition: ToolDefinition, context: ToolContext, transport: GuardedTransport) -> httpx2.AsyncClient:
    headers = {
        **definition.secret_headers,
        "User-Agent": USER_AGENT,
        "Accept-Encoding": "identity",
        "Idempotency-Key": context.invocation_id,
    }
    timeout = httpx2.Timeout(None, connect=settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS)
    return httpx2.AsyncClient(transport=transport, headers=headers, timeout=timeout, trust_env=False)


async def find_tool(client: Client, definition: ToolDefinition, name: str) -> None:
    """Look it up before it is called: the SDK wants its schemas, and would ask for them after the call otherwise."""
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        if any(tool.name == name for tool in page.tools):
            return
        cursor = page.next_cursor
        if cursor is None:
            break
    raise ToolFailure(TOOL_ERROR, f"The server of {definition.name} has no tool {name}.")


def failure_of(definition: ToolDefinition, transport: GuardedTransport, error: BaseException) -> ToolFailure:
    """What failed first: what the transport saw, else what the server said."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolFailure):
        return error
    if transport.problem is not None:
        return ToolFailure(TOOL_ERROR, f"{definition.name}: {transport.problem}")
    if transport.status_code > 400:  # an error of the protocol's own is 400, and says more
        return ToolFailure(TOOL_ERROR, f"{definition.name} answered with HTTP status {transport.status_code}.")
    if isinstance(error, MCPError):
        return ToolFailure(TOOL_ERROR, f"{definition.name} answered with an error: {error.message}")
    if isinstance(error, ValueError):
        return ToolFailure(TOOL_ERROR, f"{definition.name}: {error}")
    logger.warning("the MCP tool %s failed", definition.name, exc_info=error)
    return ToolFailure(TOOL_ERROR, f"{definition.name} did not answer as the protocol has it.")


def read_result(definition: ToolDefinition, result: CallToolResult) -> ToolResult:
    """Text as it is, links to resources as addresses; of what is neither, its type."""
    parts: list[str] = []
    urls: list[str] = []
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, ResourceLink):
            uri = str(block.uri)
            if is_web_address(uri):
                urls.append(uri)
            parts.append(f"{block.title or block.name}: {uri}")
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            parts.append(block.resource.text)
        else:
            kind = getattr(block, "mime_type", None) or block.type
            parts.append(f"[{kind}, which can't be shown here]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    if result.is_error:
        raise ToolFailure(TOOL_ERROR, text or f"{definition.name} failed.")
    return ToolResult(text, tuple(urls))
