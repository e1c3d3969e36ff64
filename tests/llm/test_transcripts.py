"""Tests of the requests of both adapters: a run's transcript in the format of each provider."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runs.llm.base import AssistantMessage, ToolCall, ToolMessage
from tests.llm.helpers import CALCULATE

TRANSCRIPT = (
    "First",
    "Second",
    AssistantMessage("Thinking.", (ToolCall("c1", "calculate", '{"a": "ü"}'), ToolCall("c2", "web", "{broken"))),
    ToolMessage("c1", "calculate", "42", False),
    ToolMessage("c2", "web", "INVALID_INPUT: no JSON", True),
    AssistantMessage("", (ToolCall("c3", "calculate", ""),)),
    ToolMessage("c3", "calculate", "", False),
    AssistantMessage("", ()),
    "Third",
)


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_transcript_in_openai_format(sent, settings):
    settings.MODEL_SYSTEM_PROMPT = "Be brief."
    body = sent(*TRANSCRIPT, tools=(CALCULATE,))

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First"},
        {"role": "user", "content": "Second"},
        {
            "role": "assistant",
            "content": "Thinking.",
            "tool_calls": [
                call("c1", "calculate", '{"a":"ü"}'),
                call("c2", "web", '{"malformed_arguments":"{broken"}'),
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: INVALID_INPUT: no JSON"},
        {"role": "assistant", "content": None, "tool_calls": [call("c3", "calculate", "{}")]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Third"},
    ]
    assert body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "calculate",
                "description": "Computes.",
                "parameters": CALCULATE.input_schema,
            },
        }
    ]
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_completion_tokens"] == settings.MODEL_MAX_OUTPUT_TOKENS


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_transcript_in_anthropic_format(sent, settings):
    settings.MODEL_SYSTEM_PROMPT = "Be brief."
    body = sent(*TRANSCRIPT, tools=(CALCULATE,))

    assert body["system"] == "Be brief."
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "First"}, {"type": "text", "text": "Second"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Thinking."},
                {"type": "tool_use", "id": "c1", "name": "calculate", "input": {"a": "ü"}},
                {"type": "tool_use", "id": "c2", "name": "web", "input": {"malformed_arguments": "{broken"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "42", "is_error": False},
                {"type": "tool_result", "tool_use_id": "c2", "content": "INVALID_INPUT: no JSON", "is_error": True},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c3", "name": "calculate", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c3", "content": "", "is_error": False},
                {"type": "text", "text": "Third"},
            ],
        },
    ]
    assert body["tools"] == [{"name": "calculate", "description": "Computes.", "input_schema": CALCULATE.input_schema}]
    assert body["max_tokens"] == settings.MODEL_MAX_OUTPUT_TOKENS


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_anthropic_request_starts_with_a_user_message_and_defines_all_used_tools(sent):
    earlier = AssistantMessage("Hello", (ToolCall("c1", "gone", "{}"),))
    body = sent(earlier, ToolMessage("c1", "gone", "ok", False), "  ")

    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert [tool["name"] for tool in body["tools"]] == ["gone"]
    assert all(part.get("text", "x").strip() for message in body["messages"] for part in message["content"])


@pytest.mark.parametrize(
    "arguments", ["[1]", "null", "NaN", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, "1" * 5000]
)
def test_stored_arguments_of_any_shape_are_sent_as_an_object(sent, provider: str, arguments: str):
    body = sent("Hi", AssistantMessage("", (ToolCall("c1", "t", arguments),)), ToolMessage("c1", "t", "no", True))

    (assistant,) = [message for message in body["messages"] if message["role"] == "assistant"]
    if provider == "openai":
        value = json.loads(assistant["tool_calls"][0]["function"]["arguments"])
    else:
        value = assistant["content"][0]["input"]
    assert value == {"malformed_arguments": arguments}
