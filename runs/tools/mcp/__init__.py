"""The tool type ``mcp``: each tool is a tool of an MCP server (streamable HTTP) that staff add to the catalogue.

``client`` uses the official SDK, whose import takes memory and a second or two, so the first call imports it. It runs
on the event loop of outbound requests, so that it cannot delay the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from django.utils.module_loading import import_string

from config.outbound.loop import shared
from runs.tools.base import Outcome, StillParked, ToolContext, ToolDefinition, ToolResult

_imported: dict[str, Any] = {}


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Outcome:
    """Call the server's tool. Every failure there, and a result with ``isError``, is ``TOOL_ERROR``."""
    return await _run("client.call", definition, input, context)


async def contact(definition: ToolDefinition, context: ToolContext) -> ToolResult | StillParked | None:
    """Ask for the outcome of a task, or cancel it. Raises ToolFailure."""
    return await _run("tasks.contact", definition, context)


async def _run(name: str, *arguments: Any) -> Any:
    if name not in _imported:
        _imported[name] = await asyncio.to_thread(import_string, f"{__name__}.{name}")
    return await shared.run(_imported[name](*arguments))


def list_tools(url: str, headers: Mapping[str, str]) -> list[Any]:
    """The SDK's ``Tool`` for each tool of a server: nothing of it is checked. For a thread: blocks for some seconds at
    most. Raises ToolFailure.
    """
    return shared.submit(import_string(f"{__name__}.client.list_tools")(url, headers)).result()
