"""Tests of successful turns of both adapters against a server with their wire formats."""

from __future__ import annotations

import asyncio

import pytest

from runs.llm.base import AssistantMessage, ToolCall, ToolMessage, Usage
from runs.llm.registry import client_for
from tests.llm.helpers import CALCULATE, Heard, failure, hear, request_of
from tests.llm.model_server import GREETING, INPUT_TOKENS, OUTPUT_TOKENS, ModelServer

TWO_CALLS = 'text=Let me see ü🦊.&call=calculate&args={"expression":"1 ÷ 2 🦊"}&call=ask_user&args={"question":"Why?"}'


def test_text_arrives_in_deltas_and_usage_arrives_last(turn):
    heard = turn("ms=2")

    assert heard.text == GREETING
    assert len(heard.deltas) > 1
    assert not heard.calls
    assert heard.events[-1] == Usage(INPUT_TOKENS, OUTPUT_TOKENS)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 100_000])
def test_calls_and_characters_are_complete_for_any_chunk_size(turn, size: int):
    heard = turn(f"{TWO_CALLS}&split={size}")

    assert heard.text == "Let me see ü🦊."
    assert [(call.name, call.arguments) for call in heard.calls] == [
        ("calculate", '{"expression":"1 ÷ 2 🦊"}'),
        ("ask_user", '{"question":"Why?"}'),
    ]
    assert len({call.id for call in heard.calls}) == 2
    assert heard.events[-1] == Usage(INPUT_TOKENS, OUTPUT_TOKENS)


def test_without_reported_usage_it_is_estimated(turn):
    heard = turn("usage=0&text=12345678", "x" * 400)

    assert heard.usage == Usage(100, 2)


def test_conversation_continues_after_tool_results(turn):
    heard = turn(
        "call=calculate",
        "Hi",
        AssistantMessage("", (ToolCall("c1", "calculate", "{}"),)),
        ToolMessage("c1", "calculate", "42", False),
        tools=(CALCULATE,),
    )

    assert (heard.text, heard.calls) == ("42", [])


def test_an_answer_cut_by_the_token_limit_is_kept_unless_it_is_a_call(turn, provider: str):
    reason = {"openai": "length", "anthropic": "max_tokens"}[provider]

    assert turn(f"finish={reason}").text == GREETING
    assert "MODEL_MAX_OUTPUT_TOKENS" in failure(turn, f"call=calculate&finish={reason}").message


def test_a_filtered_answer_is_an_error(turn, provider: str):
    reason = {"openai": "content_filter", "anthropic": "refusal"}[provider]

    assert "content filter" in failure(turn, f"finish={reason}").message


def test_connections_are_reused(serve, provider: str):
    async def main(server: ModelServer) -> int:
        for _ in range(3):
            await hear(client_for(provider), request_of("Hi"))
        return server.connections

    assert serve(main) == 1


def test_many_concurrent_turns(serve, provider: str):
    async def main(server: ModelServer) -> list[Heard]:
        requests = [request_of("Hi", model=f"text=answer {number}&ms=5") for number in range(150)]
        return await asyncio.gather(*(hear(client_for(provider), request) for request in requests))

    assert [heard.text for heard in serve(main)] == [f"answer {number}" for number in range(150)]
