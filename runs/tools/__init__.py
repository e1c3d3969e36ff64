"""The tools that runs call. The engine needs what is listed here and nothing behind it."""

from runs.tools.base import ToolContext, ToolDefinition, ToolFailure, ToolResult
from runs.tools.dispatch import call_tool
from runs.tools.schema import check_schema, parse_input

__all__ = ["ToolContext", "ToolDefinition", "ToolFailure", "ToolResult", "call_tool", "check_schema", "parse_input"]
