"""Tests of the requests: a run's transcript in the format of each kind of provider."""

import json
import re
from typing import Any

import pytest

from runs.llm.base import AssistantMessage, ToolCall, ToolMessage, ToolSpec
from runs.llm.registry import client_for
from tests.llm.helpers import CALCULATE, at, client_of, hear, model_of, request_of

TRANSCRIPT = (
    "First",
    "Second",
    AssistantMessage("Thinking.", (ToolCall("c1", "calculate", '{"a": "ü"}'), ToolCall("c2", "web", "{broken"))),
    ToolMessage("c1", "42", False),
    ToolMessage("c2", "INVALID_INPUT: no JSON", True),
    AssistantMessage("", (ToolCall("c3", "calculate", ""),)),
    ToolMessage("c3", "", False),
    AssistantMessage("", ()),
    "Third",
)
BRIEF: dict[str, Any] = {"tools": (CALCULATE,), "instructions": "Be brief."}


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_transcript_in_openai_format(sent):
    body = sent(*TRANSCRIPT, **BRIEF)

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
        {"role": "user", "content": "Third"},
    ]
    schema = CALCULATE.input_schema
    function = {"name": "calculate", "description": "Computes.", "parameters": schema}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["stream"]) == (8192, True)


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_transcript_in_responses_format(sent):
    body = sent(*TRANSCRIPT, **BRIEF)

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "input_text", "text": text}]}

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}

    def output(call_id: str, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call_id, "output": text}

    assert body["input"] == [
        user("First"),
        user("Second"),
        {"role": "assistant", "content": "Thinking."},
        call("c1", "calculate", '{"a":"ü"}'),
        call("c2", "web", '{"malformed_arguments":"{broken"}'),
        output("c1", "42"),
        output("c2", "Error: INVALID_INPUT: no JSON"),
        call("c3", "calculate", "{}"),
        output("c3", ""),
        user("Third"),
    ]
    tool = {"type": "function", "name": "calculate", "description": "Computes.", "strict": False}
    assert body["tools"] == [tool | {"parameters": CALCULATE.input_schema}]
    assert (body["instructions"], body["store"], body["stream"]) == ("Be brief.", False, True)
    assert body["max_output_tokens"] == 8192


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"properties": {"zone": {"type": "string"}}}], ids=str)
def test_the_schema_of_a_tool_has_what_providers_need(provider: str, schema: dict[str, Any]):
    """All refuse one without a type, OpenAI also one without properties."""
    model = model_of(at("http://127.0.0.1:9", provider))
    tool = ToolSpec("now", "Says the time.", dict(schema))
    (sent,) = client_of(model.server).body(request_of("Hi", model=model, tools=(tool,)))["tools"]
    if provider == "anthropic":
        assert sent["input_schema"] == {"type": "object"} | schema
    else:
        assert sent.get("function", sent)["parameters"] == {"type": "object", "properties": {}} | schema
    assert tool.input_schema == schema


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_transcript_in_anthropic_format(sent):
    body = sent(*TRANSCRIPT, **BRIEF)
    mark = {"cache_control": {"type": "ephemeral"}}

    def result(call_id: str, text: str, is_error: bool = False) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": call_id, "content": text, "is_error": is_error}

    assert body["system"] == [{"type": "text", "text": "Be brief."} | mark]
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
        {"role": "user", "content": [result("c1", "42"), result("c2", "INVALID_INPUT: no JSON", True) | mark]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c3", "name": "calculate", "input": {}}]},
        {"role": "user", "content": [result("c3", ""), {"type": "text", "text": "Third"} | mark]},
    ]
    tool = {"name": "calculate", "description": "Computes.", "input_schema": CALCULATE.input_schema}
    assert body["tools"] == [tool | mark]
    assert body["max_tokens"] == 8192


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_an_anthropic_request_has_users_messages_first_and_last_and_all_used_tools(sent):
    earlier = AssistantMessage("Hello", (ToolCall("c1", "gone", "{}"),))
    body = sent(earlier, ToolMessage("c1", "ok", False), "  ", AssistantMessage("Well"), " ")

    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert [tool["name"] for tool in body["tools"]] == ["gone"]
    assert all(part.get("text", "x").strip() for message in body["messages"] for part in message["content"])


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_at_most_four_cache_breakpoints_which_advance_with_the_transcript(sent):
    steps: list[Any] = ["Go"]
    for number in range(6):
        steps += [AssistantMessage("", (ToolCall(f"c{number}", "calculate", "{}"),))]
        steps += [ToolMessage(f"c{number}", "42", False)]
    marked = re.findall(r"cache_control", json.dumps(body := sent(*steps, **BRIEF)))
    assert len(marked) == 4
    assert [at for at, m in enumerate(body["messages"]) if "cache_control" in m["content"][-1]] == [10, 12]
    assert "cache_control" not in json.dumps(sent(*steps, **BRIEF, catalogue={"dialect": {"promptCacheKey": False}}))


@pytest.mark.parametrize(
    "arguments", ["[1]", "null", "NaN", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, "1" * 5000]
)
def test_stored_arguments_of_any_shape_are_sent_as_an_object(sent, provider: str, arguments: str):
    body = sent("Hi", AssistantMessage("", (ToolCall("c1", "t", arguments),)), ToolMessage("c1", "no", True))

    if provider == "openai_responses":
        value = json.loads(next(item for item in body["input"] if "arguments" in item)["arguments"])
    else:
        (assistant,) = [message for message in body["messages"] if message["role"] == "assistant"]
        if provider == "openai":
            value = json.loads(assistant["tool_calls"][0]["function"]["arguments"])
        else:
            value = assistant["content"][0]["input"]
    assert value == {"malformed_arguments": arguments}


# --- names and ids ---------------------------------------------------------------------------------------------------
ODD = ["a.b", "a b", "a/b", "ä", "x" * 200, "x" * 199 + "y", "web.search/v2", "🦊"]


def test_odd_names_are_accepted_on_the_wire_and_come_back(serve, provider: str):
    """No two of them become one, and each call comes back with the name that the tool has here."""
    tools = tuple(ToolSpec(name, "", {"type": "object"}) for name in [*ODD, "plain"])
    found: list[str] = []

    async def main(server: Any) -> list[str]:
        plain = model_of(at(server.url, provider))
        await hear(client_for(plain.server), request_of("Hi", model=plain, tools=tools))
        wire = [tool.get("name") or tool["function"]["name"] for tool in server.requests[0].body["tools"]]
        for name in wire:
            model = model_of(at(server.url, provider), f"call={name}")
            heard = await hear(client_for(model.server), request_of("Hi", model=model, tools=tools))
            found.extend(call.name for call in heard.calls)
        return wire

    wire = serve(main)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in wire)
    assert len(set(wire)) == len(wire)
    assert found == [*ODD, "plain"]


@pytest.mark.parametrize("call_id", ["functions.web:0", "x" * 200, "ä", "call_ok-1"])
def test_ids_of_calls_are_accepted_on_the_wire_and_agree_with_their_results(sent, provider: str, call_id: str):
    calls = AssistantMessage("", (ToolCall(call_id, "t", "{}"), ToolCall("other", "t", "{}")))
    text = json.dumps(sent("Hi", calls, ToolMessage(call_id, "1", False), ToolMessage("other", "2", False)))

    ids = re.findall(r'"(?:id|call_id|tool_call_id|tool_use_id)": "([^"]*)"', text)
    assert ids[:2] == ids[2:]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,40}", value) for value in ids)
    assert ids[0] == call_id or call_id != "call_ok-1"


def test_mistral_gets_ids_of_nine_letters_and_digits():
    server = at("", "openai", base_url="https://api.mistral.ai/v1")
    calls = AssistantMessage("", (ToolCall("toolu_01", "t", "{}"), ToolCall("abcDEF123", "t", "{}")))
    results = (ToolMessage("toolu_01", "1", False), ToolMessage("abcDEF123", "2", False))
    body = client_of(server).body(request_of("Hi", calls, *results, model=model_of(server, "mistral-large")))

    sent = [call["id"] for call in body["messages"][1]["tool_calls"]]
    assert sent == [message["tool_call_id"] for message in body["messages"][2:]]
    assert re.fullmatch("[a-zA-Z0-9]{9}", sent[0])
    assert sent[1] == "abcDEF123"
    assert "stream_options" not in body
    assert "max_tokens" in body


# --- parameters ------------------------------------------------------------------------------------------------------
ALL = {"temperature": 0.5, "topP": 0.9, "reasoningEffort": "low", "stop": ["END"], "seed": 7, "extra": {"user": "u"}}


def parameters_of(kind: str, url: str, model: str, *, tools: Any = (CALCULATE,), **fields: Any) -> dict[str, Any]:
    server = at("", kind, base_url=url)
    request = request_of("Hi", model=model_of(server, model, parameters=ALL, **fields), tools=tools, instructions=" ")
    return client_of(server).body(request)


def test_parameters_of_chat_completions():
    plain = parameters_of("openai", "http://127.0.0.1:1/v1", "llama")
    assert plain.items() >= {"temperature": 0.5, "top_p": 0.9, "stop": ["END"], "seed": 7}.items()
    assert plain["reasoning_effort"] == "low"
    reasoning = parameters_of("openai", "https://api.openai.com/v1", "gpt-5.4")
    assert not {"temperature", "top_p", "stop", "max_tokens"} & reasoning.keys()
    assert (reasoning["reasoning_effort"], reasoning["max_completion_tokens"]) == ("none", 8192)
    assert parameters_of("openai", "https://api.openai.com/v1", "gpt-5.4", tools=())["reasoning_effort"] == "low"
    assert reasoning["prompt_cache_key"] == "chat_1"
    assert parameters_of("openai", "https://api.mistral.ai/v1", "m")["random_seed"] == 7
    one = parameters_of("openai", "http://127.0.0.1:1/v1", "m", dialect={"parallelToolCalls": False})
    assert one["parallel_tool_calls"] is False


def test_a_request_without_tools_does_not_say_how_they_are_called(sent):
    """OpenAI refuses one that does."""
    body = sent("Hi", catalogue={"dialect": {"parallelToolCalls": False}})
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & body.keys()


def test_parameters_of_responses():
    plain = parameters_of("openai_responses", "http://127.0.0.1:1/v1", "gpt-4o-mini")
    assert plain.items() >= {"temperature": 0.5, "top_p": 0.9, "reasoning": {"effort": "low"}}.items()
    assert not {"stop", "seed", "include"} & plain.keys()
    assert parameters_of("openai_responses", "http://127.0.0.1:1/v1", "our-model")["include"]
    reasoning = parameters_of("openai_responses", "https://api.openai.com/v1", "gpt-6-astra")
    assert not {"temperature", "top_p"} & reasoning.keys()
    assert reasoning["include"] == ["reasoning.encrypted_content"]
    assert reasoning["prompt_cache_key"] == "chat_1"


def test_parameters_of_anthropic():
    url = "https://api.anthropic.com"
    old = parameters_of("anthropic", url, "claude-haiku-4-5")
    assert old["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    assert old["stop_sequences"] == ["END"]
    assert not {"temperature", "top_p", "seed", "system"} & old.keys()  # the provider refuses a blank text
    new = parameters_of("anthropic", url, "claude-opus-4-8")
    assert (new["thinking"], new["output_config"]) == ({"type": "adaptive"}, {"effort": "low"})
    small = parameters_of("anthropic", url, "claude-haiku-4-5", max_output_tokens=1024)
    assert small.items() >= {"temperature": 0.5, "top_p": 0.9, "max_tokens": 1024}.items()
    assert "thinking" not in small
    one = parameters_of("anthropic", url, "claude-haiku-4-5", dialect={"parallelToolCalls": False})
    assert one["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}


def test_extra_is_merged_into_the_body(sent):
    body = sent("Hi", catalogue={"parameters": {"extra": {"top_k": 5, "metadata": {"team": "blue"}}}})
    assert (body["top_k"], body["metadata"]) == (5, {"team": "blue"})
