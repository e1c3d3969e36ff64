"""Requests and transcripts for tests of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from runs.llm.base import (
    AssistantMessage,
    Message,
    ModelClient,
    ModelError,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ToolCall,
    ToolSpec,
    Usage,
    UserMessage,
)

CALCULATE = ToolSpec(
    "calculate",
    "Computes.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)


def request_of(*messages: Message | str, tools: tuple[ToolSpec, ...] = (), **fields: Any) -> ModelRequest:
    """Make a request. A string becomes a user's message."""
    transcript = tuple(UserMessage(message) if isinstance(message, str) else message for message in messages)
    values = {"model": "test-model", "run_id": "run_1", "turn_index": 1, **fields}
    return ModelRequest(messages=transcript, tools=tools, **values)


@dataclass
class Heard:
    """The events of one turn, in order."""

    events: list[ModelEvent] = field(default_factory=list)

    @property
    def deltas(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, TextDelta)]

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def calls(self) -> list[ToolCall]:
        return [event for event in self.events if isinstance(event, ToolCall)]

    @property
    def usage(self) -> Usage:
        (usage,) = [event for event in self.events if isinstance(event, Usage)]
        return usage

    @property
    def turn(self) -> AssistantMessage:
        return AssistantMessage(self.text, tuple(self.calls))


async def hear(client: ModelClient, request: ModelRequest, heard: Heard | None = None) -> Heard:
    """Collect the events until the turn ends. If it fails, ``heard`` has the events before the failure."""
    heard = heard if heard is not None else Heard()
    async for event in client.stream(request):
        heard.events.append(event)
    return heard


def failure(turn: Callable[..., Heard], *args: Any, **kwargs: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        turn(*args, **kwargs)
    return caught.value


def data(*events: Any) -> list[bytes]:
    """Return the frames of a handwritten answer."""
    return [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events]


def openai_delta(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


OPENAI_END = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]"]
