"""The official SDKs' types accept each request's body, whatever the transcript holds."""

import base64
import json
import re
from typing import Any

import pytest
from django.utils.module_loading import import_string
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runs.engine.transcript import NO_ANSWER
from runs.llm.base import AssistantMessage, AttachedFile, ToolCall, ToolMessage, ToolSpec, UserMessage
from runs.llm.registry import client_for
from tests.llm.helpers import CALCULATE, at, client_of, model_of, request_of
from tests.llm.model_server import ModelServer
from tests.llm.sdk_types import problems
from tests.tiers import examples

# Names, because an import of the SDKs takes seconds.
TYPES = {
    "openai": "openai.types.chat.completion_create_params.CompletionCreateParamsStreaming",
    "openai_responses": "openai.types.responses.response_create_params.ResponseCreateParamsStreaming",
    "anthropic": "anthropic.types.message_create_params.MessageCreateParamsStreaming",
}
COUNT_TYPES = {
    "openai_responses": "openai.types.responses.input_token_count_params.InputTokenCountParams",
    "anthropic": "anthropic.types.message_count_tokens_params.MessageCountTokensParams",
}
MODELS = {
    "openai": ("https://api.openai.com/v1", "gpt-6-astra"),
    "openai_responses": ("https://api.openai.com/v1", "gpt-6-astra"),
    "anthropic": ("https://api.anthropic.com", "claude-opus-5"),
}

texts = st.text(max_size=30) | st.sampled_from(["", " ", "\x00", "\ud800", "🦊"])
names = st.sampled_from(["calculate", "web.search/v2", "ä b", "x" * 100]) | st.text(min_size=1, max_size=20)
arguments = st.sampled_from(["{}", "", "{broken", "[1]", '{"a": 1e400}', '{"a": NaN}']) | texts
images = st.builds(
    AttachedFile,
    name=names,
    content_type=st.sampled_from(["image/png", "image/webp"]),
    size_bytes=st.just(3),
    stored_name=st.just("x"),
    data=st.sampled_from([None, base64.b64encode(b"abc").decode()]),
    note=st.sampled_from(["", "it is too large to be shown"]),
)
documents = st.sampled_from(
    [
        AttachedFile("d.pdf", "application/pdf", 3, "x", data=base64.b64encode(b"%PDF").decode()),
        AttachedFile("t.txt", "text/plain", 3, "x", text="abc"),
        AttachedFile("z.zip", "application/zip", 3, "x", note="the content of this type cannot be shown"),
    ]
)
users = st.builds(UserMessage, texts, st.lists(images | documents, max_size=2).map(tuple))


def reasoning_of(kind: str) -> Any:
    """Items of reasoning in the form in which the adapter of a kind records them."""
    items = {
        "anthropic": [
            {"type": "thinking", "thinking": "a", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
        ],
        "openai_responses": [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e"},
            {"phase": "commentary"},
        ],
    }.get(kind)
    if items is None:
        return st.just(())
    # After an item there is no less text than before it, and there are no fewer calls.
    places = st.lists(st.integers(0, 40), min_size=4, max_size=4).map(sorted)

    def in_place(found: list[Any], characters: list[int], calls: list[int]) -> tuple[dict[str, Any], ...]:
        kept = zip(found, characters, calls, strict=False)
        return tuple({"item": item, "characters": text, "calls": before} for item, text, before in kept)

    return st.builds(in_place, st.lists(st.sampled_from(items), max_size=4), places, places)


@st.composite
def turns(draw: Any, kind: str, origin: str) -> list[Any]:
    """A turn with its calls, each of which completed, failed, was refused or lost."""
    calls = tuple(draw(st.lists(st.builds(ToolCall, names, names, arguments), max_size=3, unique_by=lambda c: c.id)))
    where = draw(st.sampled_from([origin, "other/model"]))
    messages: list[Any] = [AssistantMessage(draw(texts), calls, draw(reasoning_of(kind)), where)]
    for call in calls:
        failed = st.sampled_from(["APPROVAL_REFUSED: no", "OUTCOME_UNKNOWN: lost", "TOOL_ERROR: 🦊"])
        is_error = draw(st.booleans())
        files = () if is_error else tuple(draw(st.lists(images, max_size=2)))
        messages.append(ToolMessage(call.id, draw(failed if is_error else texts), is_error, files))
    return messages


@st.composite
def transcripts(draw: Any, kind: str, origin: str) -> list[Any]:
    parts = draw(st.lists(users.map(lambda message: [message]) | turns(kind, origin), min_size=1, max_size=6))
    return [message for part in parts for message in part]


@pytest.mark.parametrize("kind", TYPES)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@example(data=None)
def test_the_sdks_types_accept_each_body(kind: str, data: Any):
    url, name = MODELS[kind]
    parameters: dict[str, Any] = {"reasoningEffort": "high", "temperature": 1, "stop": ["x"]}
    model = model_of(at("", kind, base_url=url), name, parameters=parameters)
    messages: list[Any] = ["Hi"]
    tools: tuple[ToolSpec, ...] = ()
    if data is not None:
        messages = data.draw(transcripts(kind, model.origin))
        specs = st.builds(ToolSpec, names, texts, st.just({"type": "object", "properties": {}}))
        tools = tuple(data.draw(st.lists(specs, max_size=3, unique_by=lambda tool: tool.name)))
    body = client_of(model.server).body(request_of(*messages, model=model, tools=tools, instructions="Be brief."))

    assert problems(body, import_string(TYPES[kind])) == []
    json.dumps(body)
    check = {"openai": check_openai, "openai_responses": check_responses, "anthropic": check_anthropic}[kind]
    check(body)


@pytest.mark.parametrize("provider", COUNT_TYPES, indirect=True)
@pytest.mark.parametrize(
    ("status", "answer", "tokens"),
    [
        (200, '{"input_tokens": 1000}', 1070),  # a margin, because a provider's count before a request can be too low
        (200, '{"input_tokens": 0}', None),
        (200, "[]", None),
        (200, "<html>", None),
        (404, '{"input_tokens": 1000}', None),
    ],
)
def test_a_request_is_counted_by_the_fields_that_the_sdks_types_accept(
    serve, provider: str, status: int, answer: str, tokens: int | None
):
    async def main(server: ModelServer) -> tuple[Any, int | None]:
        server.bare = [f"HTTP/1.1 {status} Status\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode()]
        model = model_of(at(server.url, provider), parameters={"reasoningEffort": "high", "temperature": 1})
        request = request_of("Hi", model=model, tools=(CALCULATE,), instructions="Be brief.")
        counted = await client_for(model.server).count(request)
        return server.requests[0].body, counted

    body, counted = serve(main)
    assert problems(body, import_string(COUNT_TYPES[provider])) == []
    assert {"Be brief.", "Hi", "calculate"} <= set(re.findall(r"[\w .]+", json.dumps(body)))
    assert counted == tokens


# --- rules that the types cannot express -----------------------------------------------------------------------------


def check_openai(body: dict[str, Any]) -> None:
    """The results of a turn's calls follow it, each once and in front of any other message."""
    open_ids: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            open_ids.remove(message["tool_call_id"])
            continue
        assert not open_ids
        open_ids = [call["id"] for call in message.get("tool_calls", ())]
        assert message["role"] != "assistant" or message["content"] or open_ids
    assert not open_ids


def check_responses(body: dict[str, Any]) -> None:
    """As above; and after reasoning comes the rest of its turn."""
    open_ids: list[str] = []
    for item, after in zip(body["input"], [*body["input"][1:], {}], strict=False):
        follows = after.get("role") == "assistant" or after.get("type") in ("reasoning", "function_call")
        assert item.get("type") != "reasoning" or (follows and after.get("content") != NO_ANSWER)
        if item.get("type") == "function_call":
            open_ids.append(item["call_id"])
        elif item.get("type") == "function_call_output":
            open_ids.remove(item["call_id"])
        elif item.get("role") == "user":
            assert not open_ids
    assert not open_ids


def check_anthropic(body: dict[str, Any]) -> None:
    """Roles in turn, no blank text, and the results of a turn's calls first in the message after it."""
    roles = [message["role"] for message in body["messages"]]
    assert roles == [("user", "assistant")[at % 2] for at in range(len(roles))]
    assert roles[-1] == "user"
    assert json.dumps(body).count("cache_control") <= 4
    for before, message in zip([{"content": []}, *body["messages"]], body["messages"], strict=False):
        blocks = message["content"]
        assert all(block["text"].strip() for block in blocks if block["type"] == "text")
        calls = [block["id"] for block in before["content"] if block["type"] == "tool_use"]
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        assert results == calls
        assert all(block["type"] == "tool_result" for block in blocks[: len(results)])
