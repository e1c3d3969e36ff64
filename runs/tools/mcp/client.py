"""One call of a tool of an MCP server, or its list of tools, with the official SDK.

The package imports this module when it is first needed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import httpx2
from django.conf import settings
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from config.kernel.jsontext import dumps
from config.outbound.client import check_url
from runs.tools.base import (
    ToolContext,
    ToolDefinition,
    ToolFailure,
    ToolImage,
    ToolResult,
    is_web_address,
    result_text,
    secrets_in,
    tool_error,
    without_secrets,
)
from runs.tools.files import image_of
from runs.tools.http import USER_AGENT
from runs.tools.mcp.transport import GuardedTransport

logger = logging.getLogger(__name__)

# A server may list its tools on pages. The limit protects from a list without an end.
LIST_PAGES_MAX = 20


async def call(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Call the tool. Raises ToolFailure. The caller limits the time by a cancellation."""
    transport = GuardedTransport(str(context.user_id), input)
    name = definition.remote_name or definition.name
    result: CallToolResult | None = None
    try:
        headers = {**definition.secret_headers, "Idempotency-Key": context.invocation_id}
        async with connected(definition.url, headers, transport) as client:
            await find_tool(client, definition, name)
            result = await client.call_tool(name, json.loads(dumps(input)))
    except Exception as error:
        # The result is complete, so a failure while the connection closes does not matter.
        if result is None:
            raise failure_of(definition.name, transport, error, definition.without_secrets) from None
    if result is None:
        raise tool_error(f"{definition.name} did not answer.")
    return read_result(definition, result)


async def list_tools(url: str, headers: Mapping[str, str]) -> list[Tool]:
    """All tools of a server. Raises ToolFailure."""
    transport = GuardedTransport()
    limit = settings.STAFF_REQUEST_SECONDS
    found: list[Tool] = []
    complete = False
    try:
        async with asyncio.timeout(limit), connected(url, headers, transport) as client:
            async for tools in pages(client):
                found += tools
            complete = True
    except TimeoutError:
        if not complete:
            raise tool_error(f"The server did not answer within {limit:g} seconds.") from None
    except Exception as error:
        if not complete:
            redact = partial(without_secrets, secrets=secrets_in("", headers.values()))
            raise failure_of("The server", transport, error, redact) from None
    return found


@contextlib.asynccontextmanager
async def connected(url: str, headers: Mapping[str, str], transport: GuardedTransport) -> AsyncIterator[Client]:
    check_url(url, allow_private=True)  # the form only; the transport checks the address
    headers = {**headers, "User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    async with httpx2.AsyncClient(transport=transport, headers=headers, trust_env=False) as http:
        streams = streamable_http_client(url, http_client=http, max_sse_event_size=settings.TOOL_ANSWER_MAX_BYTES)
        who = Implementation(name=USER_AGENT, version="1.0.0")
        async with Client(streams, client_info=who, cache=None) as client:
            yield client


async def pages(client: Client) -> AsyncIterator[list[Tool]]:
    """The server's tools, page by page."""
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        yield page.tools
        cursor = page.next_cursor
        if cursor is None:
            break


async def find_tool(client: Client, definition: ToolDefinition, name: str) -> None:
    """Find the tool before the call: otherwise the SDK asks for its schemas after the call."""
    async for tools in pages(client):
        if any(tool.name == name for tool in tools):
            return
    raise tool_error(f"The server of {definition.name} has no tool {name}.")


def failure_of(
    name: str, transport: GuardedTransport, error: BaseException, redact: Callable[[str], str]
) -> ToolFailure:
    """The first failure: that of the transport, else the server's own error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolFailure):
        return error
    if transport.problem is not None:
        return tool_error(f"{name}: {transport.problem}")
    if transport.status_code > 400:  # an error of the protocol has status 400, and its message says more
        return tool_error(f"{name} answered with HTTP status {transport.status_code}.")
    if isinstance(error, MCPError):
        return tool_error(f"{name} answered with an error: {redact(error.message)}")
    if isinstance(error, ValueError):
        return tool_error(f"{name}: {redact(str(error))}")
    logger.warning("MCP tool %s failed", name, exc_info=error)
    return tool_error(f"{name} broke the MCP protocol.")


def read_result(definition: ToolDefinition, result: CallToolResult) -> ToolResult:
    """Text unchanged, links to resources as addresses, images, and the type of all other content."""
    parts: list[str] = []
    images: list[ToolImage] = []
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
        elif image := _image(block):
            images.append(image)
        else:
            kind = getattr(block, "mime_type", None) or block.type
            parts.append(f"[{kind}, which is not text]")
    if not parts and result.structured_content is not None:
        parts.append(result_text(definition.name, result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise tool_error(definition.without_secrets(text) or f"{definition.name} failed.")
    return ToolResult(text, tuple(urls), images=tuple(images))


def _image(block: ContentBlock) -> ToolImage | None:
    """The image of a block, which is base64 text; None for any other content."""
    if isinstance(block, ImageContent):
        data, kind = block.data, block.mime_type
    elif isinstance(block, EmbeddedResource) and isinstance(block.resource, BlobResourceContents):
        data, kind = block.resource.blob, block.resource.mime_type or ""
    else:
        return None
    try:
        return image_of(base64.b64decode(data, validate=True), kind)
    except ValueError:
        return None
