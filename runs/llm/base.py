"""The port between the engine and language models: the request of a turn, its events and its errors.

Adapters are beside this module, ``registry`` says which there are. Nothing here and no adapter blocks the event loop or
touches the database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from runs.errors import RunError
from runs.tools.base import clean_text, shorten

ERROR_MESSAGE_MAX_CHARS = 1000
CHARS_PER_TOKEN = 4
TOOL_NAME_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call; ``input_schema`` is JSON Schema."""

    name: str
    description: str
    input_schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. ``arguments`` is JSON text as the model wrote it, which may be malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file attached to a user's message. For a turn, ``runs.llm.files`` adds ``text`` or ``data`` (base64), or a
    ``note`` that says why the content is missing or incomplete.
    """

    name: str
    content_type: str
    size_bytes: int
    stored_name: str
    text: str | None = None
    data: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class UserMessage:
    text: str
    files: tuple[AttachedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """One earlier turn. One ``ToolMessage`` for each of its calls follows."""

    text: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolMessage:
    tool_call_id: str
    name: str
    content: str
    is_error: bool


Message: TypeAlias = UserMessage | AssistantMessage | ToolMessage


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One turn: the whole transcript, oldest first. ``model`` is the provider's name of the model; ``turn_index``
    counts from 1.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    run_id: str
    turn_index: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The turn's token counts: at most one such event, the last."""

    input_tokens: int
    output_tokens: int


ModelEvent: TypeAlias = TextDelta | ToolCall | Usage


class ModelError(Exception):
    """The turn failed. People read the message: it has no key, header, full address or stack trace."""

    code = RunError.MODEL_ERROR

    def __init__(self, message: str) -> None:
        self.message = shorten(clean_text(message), ERROR_MESSAGE_MAX_CHARS)
        super().__init__(self.message)


class ModelTimeout(ModelError):
    """The turn took longer than MODEL_TIMEOUT_SECONDS, or sent nothing for MODEL_STALL_SECONDS."""

    code = RunError.MODEL_TIMEOUT


class ModelClient(Protocol):
    """A provider's client for one event loop."""

    # Whether the requests need the content of attached files.
    reads_files: bool

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """The events of one turn, each as soon as it arrives. The iterator ends when the turn is complete.

        Raises ModelError. A cancellation of the task that awaits it closes the connection at once.
        """

    async def aclose(self) -> None:
        """Close every connection."""


def estimate_tokens(characters: int) -> int:
    """For a provider that reports no counts: about four characters a token, at least one token."""
    return max(1, -(-characters // CHARS_PER_TOKEN))


def transcript_chars(request: ModelRequest) -> int:
    """The number of characters in a request's messages, with tool calls, results and text files."""
    total = 0
    for message in request.messages:
        if isinstance(message, ToolMessage):
            total += len(message.content)
        else:
            total += len(message.text)
            if isinstance(message, UserMessage):
                total += sum(len(file.text or "") for file in message.files)
            if isinstance(message, AssistantMessage):
                total += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return total
