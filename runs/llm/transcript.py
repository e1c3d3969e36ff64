"""Parts of a transcript that every provider's format needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from config.kernel.jsontext import MalformedJSON, parse_object, to_text
from runs.llm.base import AssistantMessage, AttachedFile, ToolCall
from runs.tools import schema

MALFORMED_ARGUMENTS = "malformed_arguments"


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as a JSON object. Malformed or too long ones become the only value of an object, as text."""
    if len(arguments) <= schema.TOOL_INPUT_MAX_CHARS:
        with suppress(MalformedJSON):
            return parse_object(arguments)
    return {MALFORMED_ARGUMENTS: arguments}


def in_order(message: AssistantMessage, origin: str | None) -> Iterator[str | ToolCall | dict[str, Any]]:
    """The texts, the calls and the items of reasoning of an earlier turn, in the order in which they came. Reasoning
    of another origin is left out, and reasoning that nothing of its turn follows: providers refuse it.
    """
    characters = calls = 0
    for kept in message.reasoning if message.origin == origin else ():
        if kept["characters"] >= len(message.text) and kept["calls"] >= len(message.tool_calls):
            break
        if text := message.text[characters : kept["characters"]]:
            yield text
        yield from message.tool_calls[calls : kept["calls"]]
        yield kept["item"]
        characters, calls = max(characters, kept["characters"]), max(calls, kept["calls"])
    if text := message.text[characters:]:
        yield text
    yield from message.tool_calls[calls:]


def schema_with_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's input. OpenAI refuses that of an object without properties."""
    return schema if "properties" in schema else {**schema, "properties": {}}


def file_text(file: AttachedFile) -> str:
    """A file as text: its name, type and size, with its text or a note why that is missing."""
    # Quoted as JSON, so that a name cannot imitate other parts of the message.
    size = f", {file.size_bytes} bytes" if file.size_bytes else ""
    label = f"Attachment {to_text(file.name)} ({file.content_type}{size})"
    if file.note:
        label += f" [{file.note}]"
    return label if file.text is None else f"{label}:\n\n{file.text}"


def data_url(file: AttachedFile) -> str:
    return f"data:{file.content_type};base64,{file.data}"
