"""A strict provider in front of the demo model, and chats that outgrow its window."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from django.utils.module_loading import import_string

from config.kernel.jsontext import to_text
from credits import ledger
from runs import catalogue
from runs.errors import FailureReason
from runs.llm.base import ModelError, ModelEvent, ModelRequest, TurnEnd, Usage
from runs.llm.demo import DemoModel
from runs.models import AgentModel
from tests.factories import UserFactory
from tests.lifecycle.conftest import Bench
from tests.llm.helpers import at, client_of, model_of, request_of
from tests.llm.sdk_types import problems
from tests.llm.test_request_types import TYPES, check_anthropic, check_openai, check_responses

CHECKS = {"openai": check_openai, "openai_responses": check_responses, "anthropic": check_anthropic}
KINDS = {kind: model_of(at("http://127.0.0.1:9", kind)) for kind in CHECKS}


class Provider:
    """The demo model behind a strict provider: it checks each request in the format of each kind, and refuses what has
    more tokens than ``window``: a token is ``bytes_per_token`` bytes. If ``knows_types``, it also checks the types of
    the official SDKs, whose import takes seconds.
    """

    knows_types = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[ModelRequest] = []
        self.window, self.bytes_per_token = 0, 4.0
        self.fails: list[FailureReason] = []
        # Requests that were refused as too long.
        self.refused = 0
        # What it answers when it is asked for a summary, instead of the demo model's.
        self.summary: Callable[[ModelRequest], AsyncIterator[ModelEvent]] | None = None
        # Whether the provider reads what it knows from the last request from its cache.
        self.caches = False
        stream = DemoModel.stream

        async def strict(model: DemoModel, request: ModelRequest) -> Any:
            self.requests.append(request)
            for kind, check in CHECKS.items():
                body = client_of(KINDS[kind].server).body(_for(request, kind))
                if self.knows_types:
                    assert problems(body, import_string(TYPES[kind])) == []
                check(body)
            if self.window and self.tokens(request) + request.max_output_tokens > self.window:
                self.refused += 1
                raise ModelError(FailureReason.CONTEXT_TOO_LONG, status=400)
            if request.summarises and self.fails:
                raise ModelError(self.fails.pop(0))
            usage = self.usage(request)
            events = self.summary(request) if self.summary and request.summarises else stream(model, request)
            async for event in events:
                yield replace(event, usage=usage) if self.caches and isinstance(event, TurnEnd) else event

        monkeypatch.setattr(DemoModel, "stream", strict)

    def tokens(self, request: ModelRequest) -> float:
        return len(self.body(request).encode()) / self.bytes_per_token

    def body(self, request: ModelRequest) -> str:
        return to_text(client_of(KINDS["openai"].server).body(_for(request, "openai")))

    def usage(self, request: ModelRequest) -> Usage:
        """By the number of bytes, and those that the request has in common with the one before."""
        text, *before = [self.prefix(request) for request in reversed(self.requests[-2:])]
        return Usage(len(text), 1, cached_tokens=common(text, *before) if before else 0)

    @staticmethod
    def prefix(request: ModelRequest) -> str:
        """The request in the order in which providers read it."""
        return str([request.tools, request.instructions, *request.messages])[:-1]

    @property
    def turns(self) -> list[ModelRequest]:
        return [request for request in self.requests if not request.summarises]

    @property
    def summaries(self) -> list[ModelRequest]:
        return [request for request in self.requests if request.summarises]

    def sent(self) -> str:
        """The newest request of a turn, as text."""
        return "\n".join(str(message) for message in self.turns[-1].messages)


def _for(request: ModelRequest, kind: str) -> ModelRequest:
    fields = {name: getattr(request, name) for name in ("instructions", "max_output_tokens")}
    # The SDKs' types know no other words of JSON Schema.
    fields["tools"] = tuple(replace(tool, input_schema={"type": "object"}) for tool in request.tools)
    return request_of(*request.messages, model=KINDS[kind], **fields)


@pytest.fixture
def provider(bench: Bench, monkeypatch) -> Provider:
    return Provider(monkeypatch)


@pytest.fixture
def window(provider: Provider, settings) -> Callable[..., None]:
    """Give the demo model a small window, which the provider enforces."""

    def set_to(tokens: int, output: int = 1000, believed: int | None = None) -> None:
        AgentModel.objects.update(context_tokens=believed or tokens, max_output_tokens=output)
        catalogue.refresh()
        provider.window = tokens

    return set_to


@pytest.fixture(autouse=True)
def rich(laws: None, user: Any) -> None:
    ledger.adjust(user.pk, 10**12, reason="for the test", staff=UserFactory(is_staff=True))


def in_chat(bench: Bench, chat: str, message: str, **body: Any) -> dict[str, Any]:
    return bench.wait(bench.start(message, chat, **body)["id"])


def common(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def fill(bench: Bench, chat: str) -> None:
    """More than a window of 3,000 tokens can hold."""
    for number in range(6):
        in_chat(bench, chat, f"remember number {number} " + "word " * 400)
