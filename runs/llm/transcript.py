"""Parts of a transcript that every provider's format needs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.conf import settings

from config.kernel.jsontext import MalformedJSON, parse_object, to_text
from runs.llm.base import AttachedFile

MALFORMED_ARGUMENTS = "malformed_arguments"


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as a JSON object. Malformed or too long ones become the only value of an object, as text."""
    if len(arguments) <= settings.TOOL_INPUT_MAX_CHARS:
        with suppress(MalformedJSON):
            return parse_object(arguments, floats=True)
    return {MALFORMED_ARGUMENTS: arguments}


def file_text(file: AttachedFile) -> str:
    """A file as text: its name, type and size, with its text or a note why that is missing."""
    # Quoted as JSON, so that a name cannot imitate other parts of the message.
    label = f"Attachment {to_text(file.name)} ({file.content_type}, {file.size_bytes} bytes)"
    if file.note:
        label += f" [{file.note}]"
    return label if file.text is None else f"{label}:\n\n{file.text}"


def data_url(file: AttachedFile) -> str:
    return f"data:{file.content_type};base64,{file.data}"
