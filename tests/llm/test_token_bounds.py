"""The bound of a request's tokens, for which credits are held, is never under the number of bytes that a provider gets.

A token stands for at least one byte of text. So the bound holds for every tokenizer if it holds for the bytes of the
body, with names and structure; images and documents, which are not counted by bytes, have bounds of their own.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runs.llm.base import AssistantMessage, AttachedFile, ToolCall, ToolMessage, ToolSpec, UserMessage
from runs.llm.measure import measure, upper_bound
from tests.llm.helpers import at, client_of, model_of, request_of
from tests.llm.test_request_types import MODELS, names, texts, transcripts
from tests.tiers import examples

KINDS = list(MODELS)


def text_bytes(value: Any) -> int:
    """The bytes of all texts, names and other values; of a file that is sent in base64, none."""
    if isinstance(value, dict):
        return sum(text_bytes(key) + text_bytes(part) for key, part in value.items())
    if isinstance(value, list):
        return sum(map(text_bytes, value))
    text = str(value)
    return 0 if text.startswith("data:") else len(text.encode())


def model_on(kind: str, **fields: Any) -> Any:
    url, name = MODELS[kind]
    return model_of(at("", kind, base_url=url), name, **{"context_tokens": 10**9, **fields})


def check(request: Any, size: int) -> None:
    assert text_bytes(client_of(request.model.server).body(request)) <= size


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@hypothesis_settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_has_more_bytes_than_its_bound(kind: str, data: Any) -> None:
    extra = {"x": data.draw(texts), "tools": [data.draw(texts)] * 20}
    model = model_on(kind, parameters={"reasoningEffort": "high", "extra": extra})
    specs = st.builds(ToolSpec, names, texts, st.just({"type": "object", "properties": {"ä": {"enum": ["🦊"]}}}))
    tools = tuple(data.draw(st.lists(specs, max_size=20, unique_by=lambda tool: tool.name)))
    messages = data.draw(transcripts(kind, model.origin))
    request = request_of(*messages, model=model, tools=tools, instructions=data.draw(texts))
    body = client_of(model.server).body(request) | extra
    try:
        sent = text_bytes(body)
    except UnicodeEncodeError:
        assume(False)  # no text of a transcript holds a lone surrogate
    assert sent <= upper_bound(request)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 1000])
def test_many_small_parts_are_bounded(kind: str, count: int) -> None:
    """What the formats add to each part must not add up."""
    calls = tuple(ToolCall(f"call_{number:035}", f"tool {number}", "") for number in range(count))
    results = [ToolMessage(call.id, "", False) for call in calls]
    files = tuple(AttachedFile(f"ä{number}", "text/plain", 0, "x", text="") for number in range(count))
    noted = tuple(AttachedFile("", "application/zip", 10**9, "x", note="the file no longer exists") for _ in files)
    tools = tuple(ToolSpec(f"t{number}", "", {}) for number in range(count))
    turns = ["", *[AssistantMessage("")] * count]
    for messages in ([AssistantMessage("", calls), *results], [UserMessage("", files)], turns):
        request = request_of(*messages, model=model_on(kind), tools=tools)
        check(request, upper_bound(request))
    request = request_of(UserMessage("", noted), model=model_on(kind))
    check(request, upper_bound(request))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_sent_with_more_digits_are_bounded(kind: str) -> None:
    call = ToolCall("1", "add", '{"numbers":[' + ",".join(["1E15"] * 1000) + "]}")
    request = request_of(AssistantMessage("", (call,)), ToolMessage("1", "", False), model=model_on(kind))
    check(request, upper_bound(request))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holder", ["user", "tool"])
@pytest.mark.parametrize("content_type", ["image/png", "application/pdf"])
def test_files_that_are_not_text_are_bounded(kind: str, holder: str, content_type: str, monkeypatch) -> None:
    """An image counts MODEL_IMAGE_TOKENS_MAX, a document as much as the model's window holds; one that is not sent
    counts as its note.
    """
    monkeypatch.setattr("runs.llm.measure.MODEL_IMAGE_TOKENS_MAX", 5000)
    file = AttachedFile("f", content_type, 3, "x", data="AAAA")
    noted = replace(file, data=None, note="the content of this type cannot be shown")
    message = UserMessage("Hi", (file,)) if holder == "user" else ToolMessage("1", "drawn", False, (file,))
    empty = UserMessage("Hi") if holder == "user" else ToolMessage("1", "drawn", False)
    model = model_on(kind, context_tokens=128_000)
    sizes = [upper_bound(request_of(holds, model=model)) for holds in (empty, message)]
    if content_type == "image/png":
        assert sizes[0] + 5000 <= sizes[1] <= sizes[0] + 6000
    else:
        assert sizes[1] == 128_000
    assert upper_bound(request_of(replace(message, files=(noted,)), model=model)) < sizes[0] + 1000


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@hypothesis_settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_after_a_counted_beginning_only_the_added_bytes_count(kind: str, data: Any) -> None:
    model = model_on(kind)
    specs = st.builds(ToolSpec, names, texts, st.just({"type": "object"}))
    tools = tuple(data.draw(st.lists(specs, max_size=3, unique_by=lambda tool: tool.name)))
    messages = data.draw(transcripts(kind, model.origin))
    fixed = {"model": model, "tools": tools, "instructions": data.draw(texts)}
    request, counted = request_of(*messages, **fixed), data.draw(st.integers(1, 100_000))
    shorter = request_of(*messages[: data.draw(st.integers(0, len(messages)))], **fixed)
    try:
        digest = measure(shorter).beginnings[-1][0]
        added = text_bytes(client_of(model.server).body(request)) - text_bytes(client_of(model.server).body(shorter))
        most = upper_bound(request, {digest: counted})
    except UnicodeEncodeError:
        assume(False)  # no text of a transcript holds a lone surrogate
    assert most == min(upper_bound(request), counted + measure(request).most - measure(shorter).most)
    assert most == upper_bound(request) or counted + added <= most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["instructions", "tools", "model", "message", "parameters"])
def test_a_count_of_another_beginning_bounds_nothing(kind: str, field: str) -> None:
    tool = ToolSpec("t", "a tool", {"type": "object"})
    given: dict[str, Any] = {"model": model_on(kind), "tools": (tool,), "instructions": "Be kind. " * 100}
    message = "Hello"
    counted = dict.fromkeys([digest for digest, _ in measure(request_of(message, **given)).beginnings], 10)
    assert upper_bound(request_of(message, **given), counted) == 10
    changes: dict[str, dict[str, Any]] = {
        "instructions": {"instructions": "Be kind. " * 101},
        "tools": {"tools": (replace(tool, description="another"),)},
        "model": {"model": replace(given["model"], provider_model="other")},
        "parameters": {"model": replace(given["model"], parameters={"reasoningEffort": "high"})},
        "message": {},
    }
    other = request_of("Hello, you" if field == "message" else message, **given | changes[field])
    most = upper_bound(other)
    assert upper_bound(other, counted) == (most if field != "message" else 10 + most - measure(other).beginnings[0][1])
    # A count above the bytes is not believed.
    assert upper_bound(other, dict.fromkeys([digest for digest, _ in measure(other).beginnings], 10**9)) == most
