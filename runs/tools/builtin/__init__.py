"""The built-in tools. ``ask_user`` is not among them here: the engine itself turns it into a waitpoint."""

from __future__ import annotations

from typing import Any

from runs.tools import files
from runs.tools.base import (
    INVALID_INPUT,
    TOOL_ERROR,
    UNKNOWN_TOOL,
    Executor,
    ToolContext,
    ToolDefinition,
    ToolFailure,
    ToolResult,
    in_thread,
)
from runs.tools.builtin.calculate import CalculationError
from runs.tools.builtin.calculate import calculate as value_of
from runs.tools.builtin.draw_chart import draw_chart as drawing_of
from runs.tools.builtin.web_fetch import fetch_text

CHART_FILE_NAME = "chart.svg"


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Calls the built-in tool of the definition's name."""
    tool = TOOLS.get(definition.name)
    if tool is None:
        raise ToolFailure(UNKNOWN_TOOL, f"There is no built-in tool {definition.name}.")
    return await tool(definition, input, context)


async def calculate(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    try:
        return ToolResult(await in_thread(context, value_of, input["expression"]))
    except CalculationError as error:
        raise ToolFailure(TOOL_ERROR, str(error)) from None


async def web_fetch(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    return ToolResult(await in_thread(context, fetch_text, input["url"], context.timeout_seconds))


async def create_file(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    name = input["fileName"]
    if not files.is_file_name(name):
        raise ToolFailure(INVALID_INPUT, "The input does not fit: at fileName: this can't be a file's name.")
    content = input["content"].encode("utf-8", "replace")
    url = await _store(context, name, content)
    return ToolResult(f"{name} was created ({len(content)} bytes): {url}", (url,))


async def draw_chart(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    drawing = await in_thread(context, drawing_of, input["title"], input["series"])
    url = await _store(context, CHART_FILE_NAME, drawing.encode("utf-8", "replace"))
    return ToolResult(f"The chart was drawn: {url}", (url,))


async def _store(context: ToolContext, name: str, content: bytes) -> str:
    try:
        return await in_thread(context, files.store, context.invocation_id, name, content)
    except files.FileNotStored as error:
        raise ToolFailure(TOOL_ERROR, "The file could not be stored.") from error


def file_name_of(tool: str, input: dict[str, Any]) -> str | None:
    """What a call's file is called, made or not; None if the tool makes none."""
    if tool == "draw_chart":
        return CHART_FILE_NAME
    return str(input.get("fileName", "")) if tool == "create_file" else None


TOOLS: dict[str, Executor] = {
    "calculate": calculate,
    "create_file": create_file,
    "draw_chart": draw_chart,
    "web_fetch": web_fetch,
}
