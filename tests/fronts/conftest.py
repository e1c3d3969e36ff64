"""A client of the AI SDK's routes in the test process, with the engine that executes its runs."""

import json
from typing import Any

import pytest

from config.kernel.jsontext import to_text
from runs.fronts.rendering import Facts, Part, Rendering
from runs.streams.reads import Event
from tests.lifecycle.conftest import Bench, bench, engines  # noqa: F401

Frame = tuple[str, Any]


def parse(body: bytes) -> list[Frame]:
    """The frames of a stream as (id, JSON or text)."""
    found = []
    for block in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["id"], fields["data"] if fields["data"][0] == "[" else json.loads(fields["data"])))
    return found


def said(text: str, name: str = "u1") -> dict[str, Any]:
    """A user's message as a client sends it."""
    return {"id": name, "role": "user", "parts": [{"type": "text", "text": text}]}


class UseChat:
    """What ``useChat`` requests of the chat ``key``."""

    def __init__(self, driver: Bench, key: str = "my chat", base: str = "/api/v1", client: Any = None) -> None:
        self.bench, self.key = driver, key
        self.client, self.api = client or driver.client, f"{base}/ai-sdk/chat"

    def post(self, *messages: dict[str, Any], **body: Any) -> Any:
        return self.client.post(self.api, {"id": self.key, "messages": messages, **body}, format="json")

    def send(self, *messages: dict[str, Any], **body: Any) -> list[Frame]:
        answer = self.post(*messages, **body)
        assert answer.status_code == 200, answer.content
        return parse(b"".join(answer.streaming_content))

    def get(self, path: str, **headers: str) -> Any:
        return self.client.get(f"{self.api}/{self.key}/{path}", headers=headers)

    def resume(self, path: str = "stream", **headers: str) -> list[Frame]:
        answer = self.get(path, **headers)
        assert answer.status_code == 200, answer.content
        return parse(b"".join(answer.streaming_content))

    def messages(self) -> list[dict[str, Any]]:
        return self.get("messages").json()["messages"]

    def runs(self, query: str = "") -> list[dict[str, Any]]:
        """The chat's runs, oldest first."""
        (chat,) = self.client.get("/api/v1/chats", {"clientId": self.key}).json()["items"]
        return self.client.get(f"/api/v1/chats/{chat['id']}/runs{query}").json()["items"][::-1]

    def run(self, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
        """Send, and wait until the newest run of the chat needs an answer or has ended."""
        self.send(*messages, **body)
        return self.bench.wait(self.runs()[-1]["id"], "waiting", "completed", "failed", "cancelled")


@pytest.fixture
def chat(bench: Bench) -> UseChat:  # noqa: F811
    return UseChat(bench)


class Feed:
    """Feeds a rendering with events that are made here."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering, self.index = rendering, 0

    def __call__(
        self, kind: str, facts: Facts = None, /, *, final: bool = False, how: Any = (), **data: Any
    ) -> list[Part]:
        self.index += 1
        return self.rendering.feed(Event(self.index, kind, to_text(data), final), facts, **dict(how))
