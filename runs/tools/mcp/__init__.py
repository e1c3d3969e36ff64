"""The tool type ``mcp``: tools of MCP servers (streamable HTTP). The first call imports the official SDK, which takes
memory and a second or two. The SDK runs on the event loop of outbound requests, so that it cannot delay the engine's.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from django.utils.module_loading import import_string

from config.outbound.loop import shared
from runs.tools.base import Outcome, ToolContext, ToolDefinition


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Outcome:
    """Call the server's tool. Every failure of the server, and a result with ``isError``, is ``TOOL_ERROR``."""
    call = await asyncio.to_thread(import_string, f"{__name__}.client.call")
    return await shared.run(call(definition, input, context))


async def contact(definition: ToolDefinition, context: ToolContext) -> Outcome | None:
    """Ask for the outcome of a task, or cancel it. Raises ToolFailure."""
    ask = await asyncio.to_thread(import_string, f"{__name__}.tasks.contact")
    return await shared.run(ask(definition, context))


def list_tools(url: str, headers: Mapping[str, str]) -> list[Any]:
    """The SDK's ``Tool`` for each tool of a server. Blocks at most STAFF_REQUEST_SECONDS. Raises ToolFailure."""
    return shared.submit(import_string(f"{__name__}.client.list_tools")(url, headers)).result()
