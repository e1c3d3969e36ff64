"""Tests of reasoning: it is recorded as it came, in its place, and goes back to the same provider and model only."""

import json
from dataclasses import replace
from typing import Any

import pytest

from runs.llm.base import AssistantMessage, ToolCall, ToolMessage
from runs.llm.registry import client_for
from tests.llm.helpers import CALCULATE, OPENAI_END, at, client_of, data, hear, model_of, openai_delta, request_of
from tests.llm.model_server import ModelServer
from tests.llm.wire_formats import ENCRYPTED, SIGNATURE

BACK = {"dialect": {"reasoningBack": True}}
CALL = "reason=Let me think.&text=Wait.&call=calculate"


def next_body(earlier: AssistantMessage, kind: str, base_url: str = "", **fields: Any) -> dict[str, Any]:
    """The body of the request after ``earlier`` and the results of its calls, with the same or another model."""
    server = at("", kind, base_url=base_url)
    model = model_of(server, **{"dialect": {"reasoningBack": True}, **fields})
    origin = model.origin if earlier.origin == "same" else "other/model"
    results = tuple(ToolMessage(call.id, "42", False) for call in earlier.tool_calls)
    request = request_of("Hi", replace(earlier, origin=origin), *results, model=model, tools=(CALCULATE,))
    return client_of(server).body(request)


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_thinking_goes_back_with_its_signature_and_in_its_order(turn):
    heard = turn(CALL)
    (_, assistant, _) = next_body(replace(heard.turn, origin="same"), "anthropic")["messages"]

    assert heard.text == "Wait."
    assert [block["type"] for block in assistant["content"]] == ["thinking", "redacted_thinking", "text", "tool_use"]
    assert assistant["content"][0] == {"type": "thinking", "thinking": "Let me think.", "signature": SIGNATURE}
    assert assistant["content"][1] == {"type": "redacted_thinking", "data": ENCRYPTED}


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
@pytest.mark.parametrize("fault", ["", "json"])
def test_thinking_between_texts_and_calls_keeps_its_place(turn, fault: str):
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "a", "signature": "1"},
        {"type": "text", "text": "One. "},
        {"type": "redacted_thinking", "data": "b"},
        {"type": "text", "text": "Two."},
        {"type": "tool_use", "id": "c1", "name": "calculate", "input": {"expression": "1"}},
        {"type": "thinking", "thinking": "c", "signature": "3"},
        {"type": "tool_use", "id": "c2", "name": "calculate", "input": {}},
    ]
    end = {"stop_reason": "tool_use"}
    if fault:
        raw = [json.dumps({"type": "message", "content": blocks, **end}).encode()]
    else:
        events = [
            event
            for index, block in enumerate(blocks)
            for event in (
                {"type": "content_block_start", "index": index, "content_block": block},
                {"type": "content_block_stop", "index": index},
            )
        ]
        raw = data(*events, {"type": "message_delta", "delta": end}, {"type": "message_stop"})
    heard = turn("x", raw=raw)
    (_, assistant, _) = next_body(replace(heard.turn, origin="same"), "anthropic")["messages"]

    assert heard.text == "One. Two."
    assert assistant["content"] == blocks


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_encrypted_items_and_phases_go_back_in_their_order(turn):
    heard = turn(CALL + "&phase=1", catalogue=BACK)
    items = next_body(replace(heard.turn, origin="same"), "openai_responses")["input"]

    assert [item.get("type", item.get("role")) for item in items] == [
        "user", "reasoning", "assistant", "function_call", "function_call_output"
    ]  # fmt: skip
    assert items[1] == {
        "id": "rea_1_0",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "Let me think."}],
        "encrypted_content": ENCRYPTED,
    }
    assert items[2] == {"role": "assistant", "content": "Wait.", "phase": "commentary"}


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_encrypted_reasoning_is_asked_for_and_goes_back(turn):
    heard = turn(CALL)
    items = next_body(replace(heard.turn, origin="same"), "openai_responses", dialect={})["input"]

    assert [item["encrypted_content"] for item in items if item.get("type") == "reasoning"] == [ENCRYPTED]


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_a_model_that_refuses_encrypted_reasoning_is_asked_without_it(serve):
    """OpenAI's models that do not reason refuse it, and behind Azure they have any name."""

    async def main(server: ModelServer) -> list[bool]:
        server.refuses_encrypted = True
        model = model_of(at(server.url, "openai_responses"), "our-model")
        for _ in range(2):
            assert (await hear(client_for(model.server), request_of("Hi", model=model))).text
        return ["include" in request.body for request in server.requests]

    assert serve(main) == [True, False, False]


@pytest.mark.parametrize(("text", "types"), [("", []), ("Wait.", ["reasoning", "assistant"])])
def test_encrypted_reasoning_without_what_follows_it_is_left_out(text: str, types: list[str]):
    """The provider refuses such an item unless the rest of its own turn follows."""

    def item(name: str, characters: int) -> dict[str, Any]:
        reasoning = {"type": "reasoning", "id": name, "summary": [], "encrypted_content": ENCRYPTED}
        return {"item": reasoning, "characters": characters, "calls": 0}

    earlier = AssistantMessage(text, (), (item("rs_1", 0), item("rs_2", len(text))), "same")
    items = next_body(earlier, "openai_responses")["input"]

    assert [part.get("type", part.get("role")) for part in items] == ["user", *types]


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_a_reasoning_text_goes_back_in_its_field(turn):
    heard = turn(CALL, catalogue=BACK)
    (_, assistant, _) = next_body(replace(heard.turn, origin="same"), "openai")["messages"]

    assert assistant["reasoning_content"] == "Let me think."
    assert assistant["tool_calls"]


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_the_newer_name_of_the_field_is_read_too(turn):
    raw = data(openai_delta(reasoning="a"), openai_delta(reasoning="b", content="c"), *OPENAI_END)
    heard = turn("x", raw=raw, catalogue=BACK)

    assert (heard.text, heard.end.reasoning) == ("c", ({"field": "reasoning", "value": "ab"},))


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_details_are_merged_by_index_and_go_back_as_they_came(turn):
    def delta(**detail: Any) -> dict[str, Any]:
        return openai_delta(reasoning="x", reasoning_details=[detail])

    text = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
    raw = data(
        delta(**text, text="Let me "),
        delta(**text, text="think."),
        delta(**text, signature=SIGNATURE),
        delta(type="reasoning.encrypted", data="a", id="rs_1", index=1),
        delta(type="reasoning.encrypted", data="b", id="rs_2", index=1),
        delta(type="reasoning.summary", summary="In ", index=2),
        delta(type="reasoning.summary", summary="short.", index=2),
        openai_delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "calculate", "arguments": "{}"}}]),
        *OPENAI_END,
    )
    heard = turn("x", raw=raw, catalogue={"dialect": {"reasoningBack": True, "reasoningField": "reasoning_details"}})
    dialect = {"reasoningBack": True, "reasoningField": "reasoning_details"}
    (_, assistant, _) = next_body(replace(heard.turn, origin="same"), "openai", dialect=dialect)["messages"]

    assert assistant["reasoning_details"] == [
        {**text, "text": "Let me think.", "signature": SIGNATURE},
        {"type": "reasoning.encrypted", "data": "a", "id": "rs_1", "index": 1},
        {"type": "reasoning.encrypted", "data": "b", "id": "rs_2", "index": 1},
        {"type": "reasoning.summary", "summary": "In short.", "index": 2},
    ]


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_signatures_of_calls_go_back_with_their_calls(turn):
    """Gemini refuses a turn whose first call has none."""
    dialect = {"dialect": {"reasoningBack": True, "reasoningField": "extra_content"}}
    signed = {"extra_content": {"google": {"thought_signature": SIGNATURE}}}
    unsigned = {"extra_content": {"google": {"thought_signature": "skip_thought_signature_validator"}}}
    function = {"name": "calculate", "arguments": "{}"}
    calls = [{"index": 0, "id": name, "function": function} for name in "abc"]
    raw = data(
        *[openai_delta(tool_calls=[call | extra]) for call, extra in zip(calls, (signed, {}, signed), strict=True)]
    )
    raw += data(openai_delta(extra_content={"google": {"thought": True}}))  # of the message: it is not sent back
    heard = turn("x", raw=[*raw, *data(*OPENAI_END)], catalogue=dialect)

    for origin, extras in (("same", [signed, {}, signed]), ("other", [unsigned, {}, {}])):
        (_, assistant, *_) = next_body(replace(heard.turn, origin=origin), "openai", **dialect)["messages"]
        sent = [
            {"id": call["id"]} | {name: call[name] for name in signed if name in call}
            for call in assistant["tool_calls"]
        ]
        assert sent == [{"id": name} | extra for name, extra in zip("abc", extras, strict=True)]


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_thinking_within_the_content_is_not_text(turn):
    def thinking(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}

    raw = data(
        openai_delta(content=[thinking("Let me ")]),
        openai_delta(content=[thinking("think.")]),
        openai_delta(content=[{"type": "text", "text": "Done."}]),
        *OPENAI_END,
    )
    heard = turn("x", raw=raw, catalogue=BACK)
    (_, assistant) = next_body(replace(heard.turn, origin="same"), "openai")["messages"]

    assert heard.text == "Done."
    assert assistant["content"] == [thinking("Let me think."), {"type": "text", "text": "Done."}]
    assert turn("x", raw=raw).end.reasoning == (), "nothing is recorded that does not go back"


def test_reasoning_goes_to_its_own_origin_only(turn, provider: str):
    heard = turn(CALL, catalogue=BACK)

    assert heard.end.reasoning
    for base_url in ("", "https://api.deepseek.com/v1"):
        text = json.dumps(next_body(replace(heard.turn, origin="other"), provider, base_url))
        assert not any(secret in text for secret in ("Let me think", SIGNATURE, ENCRYPTED))


def test_deepseek_gets_a_field_for_the_calls_of_other_models():
    earlier = AssistantMessage("", (ToolCall("c1", "calculate", "{}"),))
    (_, assistant, _) = next_body(earlier, "openai", "https://api.deepseek.com/v1", dialect={})["messages"]

    assert assistant["reasoning_content"] == ""


def test_no_thinking_is_asked_for_within_the_calls_of_another_model():
    """The provider refuses to think after a turn with calls that does not begin with its own thinking."""
    parameters = {"parameters": {"reasoningEffort": "medium"}}
    call = (ToolCall("c1", "calculate", "{}"),)
    thought = ({"item": {"type": "thinking", "thinking": "", "signature": "s"}, "characters": 0, "calls": 0},)

    assert "thinking" not in next_body(AssistantMessage("", call), "anthropic", **parameters)
    own = AssistantMessage("", call, thought, "same")
    assert "thinking" in next_body(own, "anthropic", **parameters)
    assert "thinking" not in next_body(own, "anthropic", dialect={"reasoningBack": False}, **parameters)
    assert "thinking" in next_body(AssistantMessage("Done."), "anthropic", **parameters)


def test_the_same_transcript_is_sent_in_the_same_bytes(turn, provider: str):
    heard = turn(CALL, catalogue=BACK)
    bodies = [json.dumps(next_body(replace(heard.turn, origin="same"), provider)) for _ in range(2)]

    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
@pytest.mark.parametrize("limit", [256, 1024, 2047, 2048, 8192, 64_000])
def test_thinking_leaves_half_of_the_output_limit_to_the_answer(effort: str, limit: int):
    fields = {"parameters": {"reasoningEffort": effort}, "max_output_tokens": limit}
    body = next_body(AssistantMessage("Done."), "anthropic", **fields)
    budget = body.get("thinking", {"budget_tokens": 0})["budget_tokens"]

    assert body["max_tokens"] == limit
    assert budget <= limit / 2
    assert budget >= 1024 if limit >= 2048 else not budget
