"""Answers that are complete and odd: broken text, connections that stay open, counts that come twice."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from runs.errors import FailureReason
from runs.llm.registry import client_for
from tests.llm.helpers import OPENAI_END, Heard, at, data, failure, hear, model_of, openai_delta, request_of
from tests.llm.model_server import ModelServer

BACK = {"dialect": {"reasoningBack": True}}
HALVES = ("a\ud83d", "\ude00\x00\ud83d", "b")
WHOLE = "a\U0001f600\ufffdb"


def begun(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": block} for index, block in enumerate(blocks)
    ]


def part(index: int, kind: str, field: str, value: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: value}}


def odd_answer(provider: str) -> list[bytes]:
    """Reasoning, a text and a call, each with a character in two halves, a NUL and a lone half."""
    name, arguments = "calculate\x00", ['{"expression":"a\ud83d', '\ude00\x00"}']
    if provider == "openai":
        call = {"index": 0, "id": "c\ud83d", "function": {"name": name, "arguments": arguments[0]}}
        more = {"index": 0, "function": {"arguments": arguments[1]}}
        return data(
            *[openai_delta(reasoning_content=half) for half in HALVES],
            *[openai_delta(content=half) for half in HALVES],
            openai_delta(tool_calls=[call]),
            openai_delta(tool_calls=[more]),
            *OPENAI_END,
        )
    if provider == "openai_responses":
        summary = [{"type": "summary_text", "text": "a\U0001f600\x00\ud83db"}]
        reasoning = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "e"}
        item = {"type": "function_call", "id": "f", "call_id": "c\ud83d", "name": name, "arguments": ""}
        done, text = "response.output_item.done", "response.output_text.delta"
        delta = {"type": "response.function_call_arguments.delta", "output_index": 2}
        return data(
            *[{"type": text, "output_index": 0, "delta": half} for half in HALVES],
            {"type": done, "output_index": 1, "item": reasoning},
            {"type": "response.output_item.added", "output_index": 2, "item": item},
            *[delta | {"delta": half} for half in arguments],
            {"type": "response.completed", "response": {"status": "completed", "output": []}},
        )
    call = {"type": "tool_use", "id": "c\ud83d", "name": name, "input": {}}
    blocks = begun({"type": "text", "text": ""}, {"type": "thinking", "thinking": "", "signature": ""}, call)
    return data(
        blocks[0],
        *[part(0, "text_delta", "text", half) for half in HALVES],
        blocks[1],
        *[part(1, "thinking_delta", "thinking", half) for half in HALVES],
        part(1, "signature_delta", "signature", "EqQB+/=="),
        blocks[2],
        *[part(2, "input_json_delta", "partial_json", half) for half in arguments],
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    )


def test_all_text_of_an_answer_can_be_stored(turn, provider: str) -> None:
    heard = turn("x", raw=odd_answer(provider), catalogue=BACK)
    (call,) = heard.calls
    (reasoning,) = heard.end.reasoning

    assert heard.text == WHOLE
    assert (call.id, call.name, call.arguments) == ("c\ufffd", "calculate", '{"expression":"a\U0001f600"}')
    assert WHOLE in json.dumps(reasoning, ensure_ascii=False)
    if provider != "openai":  # its place is counted in the text as it was passed on
        assert reasoning["characters"] == len(heard.text)
    if provider == "anthropic":
        assert reasoning["item"]["signature"] == "EqQB+/=="


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_a_call_whose_input_came_whole_is_made_only_if_the_answer_ended(turn) -> None:
    call = begun({"type": "tool_use", "id": "c", "name": "calculate", "input": {"expression": "1"}})
    reason = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}

    assert turn("x", raw=data(*call, reason)).calls[0].arguments == '{"expression":"1"}'
    assert failure(turn, "x", raw=data(*call)).reason is FailureReason.CONNECTION_LOST


@pytest.mark.parametrize("value", ["NaN", "[" * 60 + "]" * 60])
def test_reasoning_that_cannot_be_stored_is_an_error(turn, provider: str, value: str) -> None:
    odd = {"type": "thinking", "thinking": "", "signature": "", "odd": "ODD"}
    item = {"type": "reasoning", "encrypted_content": "e", "odd": "ODD"}
    events: dict[str, list[Any]] = {
        "openai": [openai_delta(reasoning_details=[{"type": "reasoning.text", "odd": "ODD"}])],
        "openai_responses": [{"type": "response.output_item.done", "output_index": 0, "item": item}],
        "anthropic": begun(odd),
    }
    raw = [frame.replace(b'"ODD"', value.encode()) for frame in data(*events[provider])] + end(provider)
    dialect = {"dialect": {"reasoningBack": True, "reasoningField": "reasoning_details"}}

    assert failure(turn, "x", raw=raw, catalogue=dialect).reason is FailureReason.MALFORMED_ANSWER


def test_a_reason_of_the_end_that_is_not_text_is_an_error(turn, provider: str) -> None:
    frames = [frame.replace(b'"REASON"', b"[7]") for frame in end(provider, reason="REASON")]

    assert failure(turn, "x", raw=frames).reason is FailureReason.MALFORMED_ANSWER


def end(provider: str, reason: str = "", *, last: bool = True, **counts: int) -> list[bytes]:
    """The end of an answer, without its ``last`` line if the provider has one after the counts."""
    if provider == "openai":
        finish = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": reason or "stop"}]}
        usage = (
            [{"choices": [], "usage": {f"{name}_tokens": count for name, count in counts.items()}}] if counts else []
        )
        return data(finish, *usage, *(["[DONE]"] if last else []))
    names = {"prompt": "input_tokens", "completion": "output_tokens"}
    usage_of = {"usage": {names[name]: count for name, count in counts.items()}}
    if provider == "openai_responses":
        status = (
            {"status": "incomplete", "incomplete_details": {"reason": reason}} if reason else {"status": "completed"}
        )
        return data({"type": "response.completed", "response": status | {"output": []} | usage_of})
    delta = {"type": "message_delta", "delta": {"stop_reason": reason or "end_turn"}}
    return data(delta | usage_of, *([{"type": "message_stop"}] if last else []))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("then", [b"", b": still here\n\n"])
def test_a_complete_answer_does_not_wait_for_the_end_of_its_connection(
    serve, provider: str, counted: bool, then: bytes, monkeypatch
) -> None:
    monkeypatch.setattr("runs.llm.connection.COUNTS_SECONDS", 0.3)
    counts = {"prompt": 11, "completion": 7} if counted else {}

    async def main(server: ModelServer) -> Heard:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        server.bare = itertools.chain([head], end(provider, last=False, **counts), itertools.repeat(then))
        model = model_of(at(server.url, provider))
        return await asyncio.wait_for(hear(client_for(model.server), request_of("Hi", model=model)), 30)

    heard = serve(main)
    assert heard.usage.estimated is not counted
    if counted:
        assert (heard.usage.input_tokens, heard.usage.output_tokens) == (11, 7)


def test_an_answer_that_ends_before_it_begins_does_not_wait_for_the_end_of_its_connection(turn, provider, settings):
    settings.MODEL_STALL_SECONDS = 5.0
    ends = {"openai": "[DONE]", "anthropic": {"type": "message_stop"}}
    last = ends.get(provider, {"type": "response.completed", "response": {}})

    assert failure(turn, "end_ms=60000", raw=data(last)).reason is FailureReason.CONNECTION_LOST


def test_counts_that_come_again_as_zero_do_not_replace_the_real_ones(turn, provider: str) -> None:
    frames = end(provider, last=False, prompt=11, completion=7)
    again = end(provider, prompt=0, completion=0)
    if provider == "openai_responses":  # it ends with its counts
        frames, again = [], [frames[0].replace(b"response.completed", b"response.in_progress"), *frames]
    usage = turn("x", raw=[*frames, *again]).usage

    assert (usage.input_tokens, usage.output_tokens, usage.estimated) == (11, 7, False)
