"""One call of a tool of an MCP server, with the official SDK. ``execute`` imports this module at the first call."""

from __future__ import annotations

import logging
from typing import Any

import httpx2
from django.conf import settings
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, EmbeddedResource, Implementation, ResourceLink, TextContent, TextResourceContents

from config.outbound.client import check_url
from runs.tools.base import (
    ToolContext,
    ToolDefinition,
    ToolFailure,
    ToolResult,
    is_web_address,
    result_text,
    tool_error,
)
from runs.tools.http import USER_AGENT
from runs.tools.mcp.transport import GuardedTransport

logger = logging.getLogger(__name__)

# A server may list its tools on pages. The limit protects from a list without an end.
LIST_PAGES_MAX = 20


async def call(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Call the tool. Raises ToolFailure. The caller limits the time by a cancellation."""
    private, limit = settings.OUTBOUND_ALLOW_PRIVATE, settings.TOOL_ANSWER_MAX_BYTES
    transport = GuardedTransport(allow_private=private, max_bytes=limit, owner=str(context.user_id))
    name = definition.remote_name or definition.name
    result: CallToolResult | None = None
    try:
        check_url(definition.url, allow_private=True)  # the form only; the transport checks the address
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
        # The result is complete, so a failure while the connection closes does not matter.
        if result is None:
            raise failure_of(definition, transport, error) from None
    if result is None:
        raise tool_error(f"{definition.name} did not answer.")
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
    """Find the tool before the call: otherwise the SDK asks for its schemas after the call."""
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        if any(tool.name == name for tool in page.tools):
            return
        cursor = page.next_cursor
        if cursor is None:
            break
    raise tool_error(f"The server of {definition.name} has no tool {name}.")


def failure_of(definition: ToolDefinition, transport: GuardedTransport, error: BaseException) -> ToolFailure:
    """The first failure: that of the transport, else the server's own error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolFailure):
        return error
    if transport.problem is not None:
        return tool_error(f"{definition.name}: {transport.problem}")
    if transport.status_code > 400:  # an error of the protocol has status 400, and its message says more
        return tool_error(f"{definition.name} answered with HTTP status {transport.status_code}.")
    if isinstance(error, MCPError):
        return tool_error(f"{definition.name} answered with an error: {error.message}")
    if isinstance(error, ValueError):
        return tool_error(f"{definition.name}: {error}")
    logger.warning("MCP tool %s failed", definition.name, exc_info=error)
    return tool_error(f"{definition.name} broke the MCP protocol.")


def read_result(definition: ToolDefinition, result: CallToolResult) -> ToolResult:
    """Text unchanged, links to resources as addresses, and the type of all other content."""
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
            parts.append(f"[{kind}, which is not text]")
    if not parts and result.structured_content is not None:
        parts.append(result_text(definition, result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise tool_error(text or f"{definition.name} failed.")
    return ToolResult(text, tuple(urls))
