"""Writing transcripts: what every provider's format needs."""

from __future__ import annotations

import json
from typing import Any

from runs.llm.base import AttachedFile

MALFORMED_ARGUMENTS = "malformed_arguments"


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object that any JSON writer takes; those that are none, whole, as its only value."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {MALFORMED_ARGUMENTS: arguments}


def file_text(file: AttachedFile) -> str:
    """A file as text: what it is called, and what it holds if that is text or why it is not shown."""
    # As JSON, so that no name can pass for anything else.
    label = f"Attachment {json.dumps(file.name, ensure_ascii=False)} ({file.content_type}, {file.size_bytes} bytes)"
    if file.note:
        label += f" [{file.note}]"
    return label if file.text is None else f"{label}:\n\n{file.text}"


def data_url(file: AttachedFile) -> str:
    return f"data:{file.content_type};base64,{file.data}"
