"""The built-in tools. Each module of this package declares one tool as ``TOOL``; ``TOOLS`` holds them by name.

A tool's catalogue row, its entry in the admin and the purge of its files follow from the declaration.
"""

import pkgutil
from importlib import import_module
from typing import Any

from runs.errors import CallError
from runs.tools.base import BuiltinTool, Outcome, ToolContext, ToolDefinition, ToolFailure

_modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
TOOLS: dict[str, BuiltinTool] = {module.TOOL.name: module.TOOL for module in _modules}


async def contact(definition: ToolDefinition, context: ToolContext) -> Outcome | None:
    """The outcome of a parked call of a built-in tool."""
    tool = TOOLS.get(definition.name)
    return None if tool is None or tool.contact is None else await tool.contact(definition, context)


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Outcome:
    """Call the built-in tool that has the definition's name."""
    tool = TOOLS.get(definition.name)
    if tool is None or tool.execute is None:
        raise ToolFailure(CallError.UNKNOWN_TOOL, f"There is no built-in tool {definition.name}.")
    return await tool.execute(definition, input, context)
