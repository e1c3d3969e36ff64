"""Tests of successful turns of each kind of provider against a server with its wire format."""

import asyncio

import pytest

from runs.errors import FailureReason
from runs.llm.base import AssistantMessage, ToolCall, ToolMessage, Usage
from runs.llm.registry import client_for
from tests.llm.helpers import CALCULATE, Heard, at, data, failure, hear, model_of, request_of
from tests.llm.model_server import ModelServer
from tests.llm.wire_formats import CACHED_TOKENS, GREETING, INPUT_TOKENS, OUTPUT_TOKENS

TWO_CALLS = 'text=Let me see ü🦊.&call=calculate&args={"expression":"1 ÷ 2 🦊"}&call=ask_user&args={"question":"Why?"}'
LENGTH = {"openai": "length", "openai_responses": "max_output_tokens", "anthropic": "max_tokens"}
FILTER = {"openai": "content_filter", "openai_responses": "content_filter", "anthropic": "refusal"}


def test_text_arrives_in_deltas_and_the_end_last(turn):
    heard = turn("ms=2")

    assert heard.text == GREETING
    assert len(heard.deltas) > 1
    assert not heard.calls
    assert heard.events[-1] is heard.end
    assert heard.end.finish_reason == "stop"
    assert heard.usage == Usage(INPUT_TOKENS, OUTPUT_TOKENS, cached_tokens=CACHED_TOKENS)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 100_000])
def test_calls_and_characters_are_complete_for_any_chunk_size(turn, size: int):
    heard = turn(f"{TWO_CALLS}&split={size}")

    assert heard.text == "Let me see ü🦊."
    assert [(call.name, call.arguments) for call in heard.calls] == [
        ("calculate", '{"expression":"1 ÷ 2 🦊"}'),
        ("ask_user", '{"question":"Why?"}'),
    ]
    assert len({call.id for call in heard.calls}) == 2
    assert heard.end.finish_reason == "tool_calls"
    assert (heard.usage.input_tokens, heard.usage.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)


@pytest.mark.parametrize("fault", ["json", "json_as_stream", "stream_as_json"])
def test_a_whole_document_is_read_as_a_stream_is(turn, fault: str):
    heard = turn(f"{TWO_CALLS}&fault={fault}")

    assert heard.text == "Let me see ü🦊."
    assert [call.name for call in heard.calls] == ["calculate", "ask_user"]
    assert [call.arguments for call in heard.calls] == ['{"expression":"1 ÷ 2 🦊"}', '{"question":"Why?"}']
    assert (heard.usage.input_tokens, heard.usage.estimated) == (INPUT_TOKENS, False)


@pytest.mark.parametrize("counts", ["0", "zero"])
def test_missing_and_zero_counts_are_estimated(turn, counts: str):
    assert turn(f"usage={counts}&text=12345678", "x" * 400).usage == Usage(100, 2, estimated=True)


def test_an_empty_answer_is_complete(turn):
    heard = turn("text=")

    assert (heard.text, heard.calls, heard.end.finish_reason) == ("", [], "stop")
    assert heard.usage.input_tokens == INPUT_TOKENS


def test_conversation_continues_after_tool_results(turn):
    heard = turn(
        "call=calculate",
        "Hi",
        AssistantMessage("", (ToolCall("c1", "calculate", "{}"),)),
        ToolMessage("c1", "42", False),
        tools=(CALCULATE,),
    )

    assert (heard.text, heard.calls) == ("42", [])


def test_an_answer_cut_by_the_token_limit_is_kept_unless_it_is_a_call(turn, provider: str):
    heard = turn(f"finish={LENGTH[provider]}")
    assert (heard.text, heard.end.finish_reason) == (GREETING, "length")

    assert failure(turn, f"call=calculate&finish={LENGTH[provider]}").reason is FailureReason.OUTPUT_LIMIT


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
@pytest.mark.parametrize(("tokens", "finish_reason"), [(15, "stop"), (16, "length"), (17, "length"), (None, "stop")])
def test_a_completed_answer_of_as_many_tokens_as_allowed_was_cut(turn, tokens: int | None, finish_reason: str):
    """llama.cpp says ``completed`` at the limit too."""
    response = {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": tokens}}
    text = {"type": "response.output_text.delta", "output_index": 0, "delta": "cut"}
    raw = data(text, {"type": "response.completed", "response": response})
    assert turn("x", raw=raw, max_output_tokens=16).end.finish_reason == finish_reason


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
@pytest.mark.parametrize("arguments", ['{"expression": "6*7"}', '{"expression": "6*'])
def test_a_completed_call_of_as_many_tokens_as_allowed_is_a_call_if_it_is_whole(turn, arguments: str):
    item = {"type": "function_call", "call_id": "c1", "name": "calculate", "arguments": arguments}
    response = {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": 16}}
    done = {"type": "response.output_item.done", "output_index": 0, "item": item}
    raw = data(done, {"type": "response.completed", "response": response})
    if arguments.endswith("}"):
        assert turn("x", raw=raw, max_output_tokens=16).calls[0].arguments == arguments
    else:
        assert failure(turn, "x", raw=raw, max_output_tokens=16).reason is FailureReason.OUTPUT_LIMIT


def test_a_filtered_answer_is_an_error(turn, provider: str):
    assert failure(turn, f"finish={FILTER[provider]}").reason is FailureReason.CONTENT_FILTERED


def test_connections_are_reused(serve, provider: str):
    async def main(server: ModelServer) -> int:
        model = model_of(at(server.url, provider))
        for _ in range(3):
            await hear(client_for(model.server), request_of("Hi", model=model))
        return server.connections

    assert serve(main) == 1


def test_many_concurrent_turns(serve, provider: str):
    async def main(server: ModelServer) -> list[Heard]:
        models = [model_of(at(server.url, provider), f"text=answer {number}&ms=5") for number in range(150)]
        return await asyncio.gather(*(hear(client_for(m.server), request_of("Hi", model=m)) for m in models))

    assert [heard.text for heard in serve(main)] == [f"answer {number}" for number in range(150)]


def test_key_is_sent_only_in_its_header(serve, provider: str):
    async def main(server: ModelServer) -> tuple[dict[str, str], str]:
        model = model_of(at(server.url, provider, headers=(("X-Team", "blue-Very5ecret"),)))
        client = client_for(model.server)
        await hear(client, request_of("Hi", model=model))
        return server.requests[0].headers, f"{model!r} {client!r} {server.requests[0].body}"

    headers, shown = serve(main)
    key = "x-api-key" if provider == "anthropic" else "authorization"
    assert {name for name, value in headers.items() if "Very5ecret" in value} == {key, "x-team"}
    assert "Very5ecret" not in shown
