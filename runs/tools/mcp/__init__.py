"""Tools that staff add, each a tool of an MCP server (streamable HTTP): ``url`` is the server's address.

The protocol is the official SDK's; ``mcp_client`` holds what needs it. It is loaded with the first call, as it takes
memory and a second or two, and runs on the loop of outbound requests: whatever it does, the engine's goes on.
"""

from __future__ import annotations

import asyncio
from typing import Any

from django.utils.module_loading import import_string

from config.outbound.loop import shared
from runs.tools.base import ToolContext, ToolDefinition, ToolResult, in_thread

CLIENT = "runs.tools.mcp.client.call"


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Calls the server's tool. Whatever goes wrong there, and a result that says ``isError``, is ``TOOL_ERROR``."""
    call = await in_thread(context, import_string, CLIENT)
    result: ToolResult = await asyncio.wrap_future(shared.submit(call(definition, input, context)))
    return result
