"""The port between the engine and language models: what a turn is asked, what comes out of it, and how it fails.

Adapters live beside this module and are imported when first used, so that a web process never loads a provider's SDK.
Nothing here or in an adapter blocks the event loop or touches the database. The tables are in ``runs.models``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from django.conf import settings
from django.utils.module_loading import import_string

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
    """A file beside a user's message. ``runs.llm.files`` gives it ``text`` or ``data`` (base64) for a turn; where
    it has neither, or not all of it, ``note`` says why.
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
    """One earlier turn; its results follow as one ``ToolMessage`` a call."""

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
    """One turn: the whole transcript, oldest first. ``model`` is the provider's name; ``turn_index`` counts from 1."""

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
    """The turn's token counts; comes at most once, last."""

    input_tokens: int
    output_tokens: int


ModelEvent: TypeAlias = TextDelta | ToolCall | Usage


class ModelError(Exception):
    """The turn failed. The message is for people: never a key, a header, a whole address or a stack trace."""

    code = "MODEL_ERROR"

    def __init__(self, message: str) -> None:
        self.message = shorten(clean_text(message), ERROR_MESSAGE_MAX_CHARS)
        super().__init__(self.message)


class ModelTimeout(ModelError):
    """The turn took longer than MODEL_TIMEOUT_SECONDS, or was silent for longer than MODEL_STALL_SECONDS."""

    code = "MODEL_TIMEOUT"


class ModelClient(Protocol):
    """A provider, for one event loop."""

    # Whether the requests' files are to be read for it.
    reads_files: bool

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """One turn's events as they come; the iterator's end is the turn's end, and only a whole turn ends it.

        Raises ModelError. Cancelling the task that awaits it closes the connection at once.
        """

    async def aclose(self) -> None:
        """Close every connection."""


PROVIDERS = {
    "demo": "runs.llm.demo.DemoModel",
    "openai": "runs.llm.openai_chat.OpenAIModel",
    "anthropic": "runs.llm.anthropic.AnthropicModel",
}
OPENAI_URL = "https://api.openai.com/v1"

# Connections belong to the loop that opened them: a client shared by two loops loses turns.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ModelClient]] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_clients.clear)


def client_for(provider: str) -> ModelClient:
    """The running loop's client of a provider, made at first use. Raises ModelError if it is unknown or not set up."""
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    client = clients.get(provider)
    if client is None:
        if provider not in PROVIDERS:
            raise ModelError(f"There is no model provider named {provider!r}; known are {', '.join(PROVIDERS)}.")
        if missing := missing_setting(provider):
            raise ModelError(f"The model provider {provider} is not set up: {missing} is missing.")
        make: Callable[[], ModelClient] = import_string(PROVIDERS[provider])
        client = clients[provider] = make()
    return client


def missing_setting(provider: str) -> str | None:
    """The setting without which a provider can't be used. A server other than OpenAI's own may need no key."""
    if provider == "openai" and not settings.OPENAI_API_KEY and settings.OPENAI_BASE_URL.rstrip("/") == OPENAI_URL:
        return "OPENAI_API_KEY"
    if provider == "anthropic" and not settings.ANTHROPIC_API_KEY:
        return "ANTHROPIC_API_KEY"
    return None


def preload() -> None:
    """Import the adapters of the providers that are set up. Blocks for seconds: for before the event loop runs."""
    for provider, adapter in PROVIDERS.items():
        if missing_setting(provider) is None:
            import_string(adapter)


async def aclose_all() -> None:
    """Close the running loop's clients; one that is asked for later is made anew."""
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        await client.aclose()


def estimate_tokens(characters: int) -> int:
    """For a model that does not count: about four characters a token, at least one token."""
    return max(1, -(-characters // CHARS_PER_TOKEN))


def transcript_chars(request: ModelRequest) -> int:
    """How much text a request's messages hold, tool calls, results and files of text included."""
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
