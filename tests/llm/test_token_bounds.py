"""The bound of a request's tokens, for which credits are held, is never under the number of bytes that a provider gets.

A token stands for at least one byte of text. So the bound holds for every tokenizer if it holds for the bytes of the
body, with names and structure; images and documents, which are not counted by bytes, have bounds of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runs.engine.spending import bound
from runs.llm.base import AssistantMessage, AttachedFile, ToolCall, ToolMessage, ToolSpec, UserMessage
from runs.llm.measure import upper_bound
from runs.models import Turn
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
    results = [ToolMessage(call.id, call.name, "", False) for call in calls]
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
    request = request_of(AssistantMessage("", (call,)), ToolMessage("1", "add", "", False), model=model_on(kind))
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
    message = UserMessage("Hi", (file,)) if holder == "user" else ToolMessage("1", "draw", "drawn", False, (file,))
    empty = UserMessage("Hi") if holder == "user" else ToolMessage("1", "draw", "drawn", False)
    model = model_on(kind, context_tokens=128_000)
    sizes = [upper_bound(request_of(holds, model=model)) for holds in (empty, message)]
    request = request_of(message, model=model)
    if content_type == "image/png":
        assert sizes[0] + 5000 <= sizes[1] <= sizes[0] + 6000
        assert bound(request, sizes[1], []) == sizes[1]
    else:
        assert bound(request, sizes[1], []) == 128_000
    assert upper_bound(request_of(replace(message, files=(noted,)), model=model)) < sizes[0] + 1000


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_second_turn_on_the_last_count_and_the_added_bytes_are_the_bound(kind: str) -> None:
    model = model_on(kind)
    first = request_of("Hi " * 1000, model=model)
    turn = Turn(origin=model.origin, input_tokens=1100, request_size=upper_bound(first))
    added = (AssistantMessage("", (ToolCall("1", "look", "{}"),)), ToolMessage("1", "look", "ä" * 500, False))
    second = request_of(*first.messages, *added, model=model)
    size = upper_bound(second)
    assert 1100 + 1000 <= bound(second, size, [turn]) <= 1100 + 1000 + 700
    # A count of another model, or one that is only an estimate, bounds nothing.
    for unusable in ({"origin": "other/model"}, {"estimated": True}, {"request_size": 0}):
        values = {"origin": model.origin, "input_tokens": 1100, "request_size": upper_bound(first)}
        assert bound(second, size, [Turn(**values | unusable)]) == size
    # A count above the bytes is not believed.
    lie = Turn(origin=model.origin, input_tokens=10**9, request_size=upper_bound(first))
    assert bound(second, size, [lie]) == size
