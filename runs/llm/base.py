"""The interface between the engine and language models: the request of a turn, its events and its errors.
``catalogue.definitions`` lists the adapters. None of them blocks the event loop or touches the database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from runs.catalogue.definitions import ModelDefinition
from runs.errors import FailureReason
from runs.tools.base import ToolSpec, clean_text, shorten

TOOL_CALLS_PER_TURN_MAX = 64
MODEL_OUTPUT_MAX_CHARS = 1_000_000  # characters per turn; a longer answer is a `MODEL_ERROR`
MODEL_ATTACHMENT_TEXT_MAX_CHARS = 200_000  # characters of text files that the model receives in one turn
MODEL_ATTACHMENT_MAX_BYTES = 20 * 1024 * 1024  # bytes of files that the model receives in one turn

ERROR_MESSAGE_MAX_CHARS = 1000
TOOL_NAME_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. ``arguments`` is JSON text as the model wrote it, which may be malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file of a user's message, or an image that a tool returned. For a turn, ``runs.llm.files`` adds ``text``,
    ``data`` in base64, or a ``note`` why the content is missing or incomplete. ``size_bytes``: 0 if it is not known.
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
    """``is_note``: a message of the service itself, in the middle of a run."""

    text: str
    files: tuple[AttachedFile, ...] = ()
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An earlier turn. A ``ToolMessage`` for each of its calls follows. ``reasoning``: items in the adapter's form,
    which go back to the same ``origin`` only.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: tuple[dict[str, Any], ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """The outcome of a call; ``files`` are images."""

    tool_call_id: str
    content: str
    is_error: bool
    files: tuple[AttachedFile, ...] = ()


Message: TypeAlias = UserMessage | AssistantMessage | ToolMessage


@dataclass(slots=True)
class Progress:
    """``usage`` returns what a request has used so far; it is None until an answer has begun."""

    usage: Callable[[], Usage] | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One turn: the whole transcript, oldest first. ``chat_id`` names it for the provider's cache."""

    model: ModelDefinition
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    chat_id: str
    turn_index: int  # from 1
    max_output_tokens: int
    instructions: str = ""
    failed_attempts: int = 0  # the number of failed requests of this turn so far, over all models
    summarises: bool = False  # whether the answer is the summary of a chat, not a turn
    progress: Progress = field(default_factory=Progress, compare=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """A turn's token counts. ``cached_tokens`` and ``cache_write_tokens`` are parts of ``input_tokens``,
    ``reasoning_tokens`` are part of ``output_tokens``. ``estimated``: the provider did not report a count.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The last event of a turn. ``finish_reason`` is ``stop``, ``length`` (the output limit was reached) or
    ``tool_calls``. A turn without text and calls is complete, too: models can end a conversation in this way after the
    last tool result. A refusal in the model's own words is text; an answer that a filter stopped is a ModelError.
    """

    usage: Usage
    finish_reason: str = "stop"
    reasoning: tuple[dict[str, Any], ...] = ()


ModelEvent: TypeAlias = str | ToolCall | TurnEnd  # a piece of the text, a complete call, or the end


class ModelError(Exception):
    """The request failed. Callers see ``message``, which names no provider, setting or address. ``detail`` is the
    provider's text for staff, without keys. ``retry_after``: seconds that the provider asked to wait.
    """

    def __init__(
        self,
        reason: FailureReason,
        message: str = "",
        *,
        detail: str = "",
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.reason, self.status, self.retry_after = reason, status, retry_after
        self.message = shorten(clean_text(message or reason.message), ERROR_MESSAGE_MAX_CHARS)
        self.detail = shorten(clean_text(detail), ERROR_MESSAGE_MAX_CHARS)
        super().__init__(self.message)


class ModelClient(Protocol):
    """A client of one server. Its constructor takes the ``Server``."""

    reads_files: bool  # whether requests need the content of attached files

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """The events of one turn, each as soon as it arrives; the last one is a ``TurnEnd``. Raises ModelError. If the
        awaiting task is cancelled, the connection is closed at once.
        """

    async def count(self, request: ModelRequest) -> int | None:
        """The most tokens of the request by the provider's count, or None. Only for dialects with ``counts_tokens``."""
