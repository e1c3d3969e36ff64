"""The built-in tool ``create_file``: a text file that the user can download."""

from typing import Any

from config.kernel.money import MICRO
from runs.errors import CallError
from runs.tools import files
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolFailure, ToolResult, input_object, text_input


async def create_file(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    name = input["fileName"]
    if not files.is_file_name(name):
        message = "The input does not fit: at fileName: this is not a valid file name."
        raise ToolFailure(CallError.INVALID_INPUT, message)
    content = input["content"].encode("utf-8", "replace")
    url = await files.store_file(context, name, content)
    return ToolResult(f"{name} was created ({len(content)} bytes): {url}", (url,))


TOOL = BuiltinTool(
    name="create_file",
    display_name="Create a file",
    description="Writes a text file that the user can download, and returns its address.",
    input_schema=input_object(
        fileName=text_input(
            files.FILE_NAME_MAX_CHARS,
            "A name without folders, such as report.md: letters, digits, blanks and _.,()+@=- only.",
        ),
        content={"type": "string", "description": "The whole text of the file."},
    ),
    price=1 * MICRO,
    execute=create_file,
    stores_files=True,
)
