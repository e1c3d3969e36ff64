"""Requests and transcripts for tests of models."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.utils.module_loading import import_string

from runs.catalogue.definitions import KINDS, ModelDefinition, Server, dialect_of
from runs.llm.base import (
    AssistantMessage,
    Message,
    ModelClient,
    ModelError,
    ModelEvent,
    ModelRequest,
    ToolCall,
    ToolSpec,
    TurnEnd,
    Usage,
    UserMessage,
)

KEY = "sk-test-Very5ecretKey0123456789"

CALCULATE = ToolSpec(
    "calculate",
    "Computes.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)


def request_of(*messages: Message | str, tools: tuple[ToolSpec, ...] = (), **fields: Any) -> ModelRequest:
    """Make a request. A string becomes a user's message."""
    transcript = tuple(UserMessage(message) if isinstance(message, str) else message for message in messages)
    values = {"model": "test-model", "chat_id": "chat_1", "turn_index": 1, **fields}
    if isinstance(values["model"], str):
        values["model"] = model_of(Server("test", "openai"), values["model"])
    values.setdefault("max_output_tokens", values["model"].max_output_tokens)
    return ModelRequest(messages=transcript, tools=tools, **values)


def at(url: str, kind: str, **fields: Any) -> Server:
    """A model server as a provider of a kind."""
    return Server(**{"name": kind, "kind": kind, "base_url": f"{url}/v1", "api_key": KEY, **fields})


def model_of(server: Server, provider_model: str = "test-model", **fields: Any) -> ModelDefinition:
    """Make the catalogue's definition of a model on a server; ``dialect`` is what staff set."""
    prices = dict.fromkeys(("price_in", "price_out", "price_cached_in", "price_cache_write"), 0)
    values: dict[str, Any] = {
        "name": "test",
        "display_name": "Test",
        "context_tokens": 128_000,
        "max_output_tokens": 8192,
        "parameters": {},
        "is_default": False,
        **prices,
        **fields,
    }
    values["dialect"] = dialect_of(server, provider_model, values.get("dialect", {}))
    return ModelDefinition(server=server, provider_model=provider_model, **values)


@dataclass
class Heard:
    """The events of one turn, in order."""

    events: list[ModelEvent] = field(default_factory=list)
    origin: str = ""

    @property
    def deltas(self) -> list[str]:
        return [event for event in self.events if isinstance(event, str)]

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def calls(self) -> list[ToolCall]:
        return [event for event in self.events if isinstance(event, ToolCall)]

    @property
    def usage(self) -> Usage:
        return self.end.usage

    @property
    def end(self) -> TurnEnd:
        (end,) = [event for event in self.events if isinstance(event, TurnEnd)]
        return end

    @property
    def turn(self) -> AssistantMessage:
        """The turn as a part of a later transcript of the same model."""
        return AssistantMessage(self.text, tuple(self.calls), self.end.reasoning, self.origin)


async def hear(client: ModelClient, request: ModelRequest, heard: Heard | None = None) -> Heard:
    """Collect the events until the turn ends, as the engine does: it does not wait for the end of the generator. If the
    turn fails, ``heard`` has the events before the failure.
    """
    heard = heard if heard is not None else Heard()
    heard.origin = request.model.origin
    async for event in client.stream(request):
        heard.events.append(event)
        if isinstance(event, TurnEnd):
            break
    return heard


def client_of(server: Server) -> Any:
    """The adapter of a server, without an event loop."""
    return import_string(KINDS[server.kind].adapter)(server)


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
