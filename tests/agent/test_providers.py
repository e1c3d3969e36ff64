"""Both adapters against a server that speaks their wire formats: what a turn gives, and every way in which it fails."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runs.agent import sse
from runs.agent.models import (
    AssistantMessage,
    ModelError,
    ModelTimeout,
    TextDelta,
    ToolCall,
    ToolMessage,
    Usage,
    aclose_all,
    client_for,
    preload,
)
from tests.agent.conftest import KEY
from tests.agent.helpers import CALCULATE, Heard, hear, request_of
from tests.agent.model_server import GREETING, INPUT_TOKENS, OUTPUT_TOKENS, ModelServer

TWO_CALLS = 'text=Let me see ü🦊.&call=calculate&args={"expression":"1 ÷ 2 🦊"}&call=ask_user&args={"question":"Why?"}'


@pytest.fixture(params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def serve(settings, provider: str) -> Callable[[Callable[[ModelServer], Awaitable[Any]]], Any]:
    """Run a coroutine function with a model server that the settings lead to."""

    def run(main: Callable[[ModelServer], Awaitable[Any]]) -> Any:
        async def inner() -> Any:
            async with ModelServer() as server:
                settings.OPENAI_BASE_URL, settings.ANTHROPIC_BASE_URL = f"{server.url}/v1", server.url
                settings.OPENAI_API_KEY = settings.ANTHROPIC_API_KEY = KEY
                try:
                    return await main(server)
                finally:
                    await aclose_all()

        return asyncio.run(inner())

    return run


@pytest.fixture
def turn(serve, provider: str) -> Callable[..., Heard]:
    """One whole turn with the model that ``wish`` describes."""

    def run(wish: str, *messages: Any, raw: list[bytes] | None = None, **fields: Any) -> Heard:
        async def main(server: ModelServer) -> Heard:
            server.raw = raw
            return await hear(client_for(provider), request_of(*(messages or ("Hi",)), model=wish, **fields))

        return serve(main)

    return run


@pytest.fixture
def sent(serve, provider: str) -> Callable[..., dict[str, Any]]:
    """The body of the request as the server got it."""

    def run(*messages: Any, **fields: Any) -> dict[str, Any]:
        async def main(server: ModelServer) -> dict[str, Any]:
            await hear(client_for(provider), request_of(*messages, **fields))
            return server.requests[0].body

        return serve(main)

    return run


def failure(turn: Callable[..., Heard], *args: Any, **kwargs: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        turn(*args, **kwargs)
    return caught.value


def data(*events: Any) -> list[bytes]:
    """Frames of an answer written by hand."""
    return [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events]


def openai_delta(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


OPENAI_END = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]"]

# --- whole turns -----------------------------------------------------------------------------------------------------


def test_text_comes_in_deltas_and_usage_last(turn):
    heard = turn("ms=2")

    assert heard.text == GREETING
    assert len(heard.deltas) > 1
    assert not heard.calls
    assert heard.events[-1] == Usage(INPUT_TOKENS, OUTPUT_TOKENS)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 100_000])
def test_calls_and_characters_survive_any_cut_of_the_bytes(turn, size: int):
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


def test_a_conversation_goes_on_after_tool_results(turn):
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


def test_connections_are_used_again(serve, provider: str):
    async def main(server: ModelServer) -> int:
        for _ in range(3):
            await hear(client_for(provider), request_of("Hi"))
        return server.connections

    assert serve(main) == 1


def test_many_turns_at_once(serve, provider: str):
    async def main(server: ModelServer) -> list[Heard]:
        requests = [request_of("Hi", model=f"text=answer {number}&ms=5") for number in range(150)]
        return await asyncio.gather(*(hear(client_for(provider), request) for request in requests))

    assert [heard.text for heard in serve(main)] == [f"answer {number}" for number in range(150)]


# --- what goes out ---------------------------------------------------------------------------------------------------

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
def test_a_transcript_as_openai_wants_it(sent, settings):
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
                call("c1", "calculate", '{"a": "ü"}'),
                call("c2", "web", '{"malformed_arguments": "{broken"}'),
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
def test_a_transcript_as_anthropic_wants_it(sent, settings):
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
def test_anthropic_gets_a_users_message_first_and_the_tools_that_a_transcript_names(sent):
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


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "Invalid value"),
        (401, "API_KEY"),
        (403, "API_KEY"),
        (404, "no model"),
        (429, "rate limit"),
        (307, "BASE_URL"),
    ]
    + [(status, "in trouble") for status in (500, 503, 529)],
)
def test_a_refusal_names_the_remedy_and_never_the_key(turn, caplog, status: int, says: str):
    caplog.set_level(logging.DEBUG)
    error = failure(turn, f"status={status}")

    assert error.code == "MODEL_ERROR"
    assert says in error.message
    assert "Very5ecret" not in "".join(traceback.format_exception(error)) + repr(error)
    assert "Very5ecret" not in caplog.text


def test_whatever_looks_like_a_key_in_a_providers_words_is_hidden(turn):
    error = failure(turn, "x", raw=data({"error": {"message": "Bad sk-live***6789 at //me:pass@host, Bearer abc"}}))

    assert error.message.endswith("Bad [key] at [key]host, [key]")


@pytest.mark.parametrize("fault", ["cut", "malformed", "no_end", "error", "html"])
def test_a_turn_that_does_not_come_to_its_end_is_an_error(turn, caplog, fault: str):
    error = failure(turn, f"fault={fault}")

    assert error.code == "MODEL_ERROR"
    assert "Very5ecret" not in caplog.text + "".join(traceback.format_exception(error))


def test_what_was_said_before_a_cut_was_heard(serve, provider: str):
    heard = Heard()

    async def main(server: ModelServer) -> None:
        await hear(client_for(provider), request_of("Hi", model="fault=cut"), heard)

    with pytest.raises(ModelError):
        serve(main)
    assert heard.text
    assert GREETING.startswith(heard.text)


@pytest.mark.parametrize("fault", ["stall", "stall_headers"])
def test_silence_is_a_timeout(turn, settings, fault: str):
    settings.MODEL_STALL_SECONDS = 0.2

    error = failure(turn, f"fault={fault}")
    assert (type(error), error.code) == (ModelTimeout, "MODEL_TIMEOUT")
    assert "silent" in error.message


def test_a_drip_is_a_timeout_of_the_whole_turn(turn, settings):
    settings.MODEL_TIMEOUT_SECONDS, settings.MODEL_STALL_SECONDS = 0.5, 0.4

    error = failure(turn, "fault=drip")
    assert isinstance(error, ModelTimeout)
    assert "longer than 0.5 seconds" in error.message


def test_output_and_calls_are_bounded(turn, settings):
    settings.MODEL_OUTPUT_MAX_CHARS = 1000
    assert "1000 characters" in failure(turn, "fault=flood").message
    assert "1000 characters" in failure(turn, f'call=t&args={{"a":"{"x" * 1000}"}}').message

    settings.TOOL_CALLS_PER_TURN_MAX = 2
    assert len(turn("call=a&call=b").calls) == 2
    assert "more than 2 tools" in failure(turn, "call=a&call=b&call=c").message


def test_an_event_without_end_is_an_error(turn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "EVENT_MAX_BYTES", 1000)

    assert "no end" in failure(turn, "x", raw=[b"data: " + b"x" * 600, b"x" * 600]).message
    assert "no end" in failure(turn, "x", raw=[b"data: " + b"x" * 600 + b"\n"] * 2).message


@pytest.mark.parametrize(
    "event", ["[]", "1", '"x"', "{", "[" * 100_000, b"\xff\xfe".decode("latin-1"), '{"type": []}{']
)
def test_an_event_of_the_wrong_shape_is_malformed(turn, event: str):
    assert "malformed" in failure(turn, "x", raw=[f"data: {event}\n\n".encode()]).message


def test_a_server_that_is_not_there(serve, provider: str, caplog):
    async def main(server: ModelServer) -> None:
        await server.stop()
        await hear(client_for(provider), request_of("Hi"))

    with pytest.raises(ModelError, match="could not be reached") as caught:
        serve(main)
    assert "127.0.0.1" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("fault", ["stall", "stall_headers", "drip"])
def test_cancelling_the_turn_closes_the_connection(serve, provider: str, fault: str):
    async def main(server: ModelServer) -> None:
        task = asyncio.create_task(hear(client_for(provider), request_of("Hi", model=f"fault={fault}")))
        await asyncio.wait_for(server.asked.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.requests[0].closed_by_client.wait(), 5)

    serve(main)


def test_leaving_a_turn_half_way_closes_the_connection(serve, provider: str):
    async def main(server: ModelServer) -> None:
        events = client_for(provider).stream(request_of("Hi", model="chunks=1000&ms=20"))
        assert isinstance(await anext(events), TextDelta)
        await events.aclose()
        await asyncio.wait_for(server.requests[0].closed_by_client.wait(), 5)

    serve(main)


# --- what servers really send ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
class TestOpenAIDialects:
    def test_a_character_in_two_halves_and_one_half_alone(self, turn):
        halves = [openai_delta(content=text) for text in ("a\x00\ud83e", "\udd8a", "b\udd8ac", "\ud83e")]
        heard = turn("x", raw=data(*halves, *OPENAI_END))

        assert heard.text == "a🦊b\ufffdc\ufffd"
        heard.text.encode()

    def test_ids_names_and_arguments_are_clean_and_bounded(self, turn):
        part = {"index": 0, "id": "i\ud800\x00" * 300, "function": {"name": "n\x00" * 300, "arguments": '"\x00\ud83e'}}
        more = {"index": 0, "function": {"arguments": '\udd8a"'}}
        (call,) = turn(
            "x", raw=data(openai_delta(tool_calls=[part]), openai_delta(tool_calls=[more]), *OPENAI_END)
        ).calls

        assert call == ToolCall(("i\ufffd" * 100), "n" * 200, '"🦊"')

    def test_calls_without_index_or_all_with_the_same_are_told_apart_by_id(self, turn):
        def parts(**index: int) -> list[dict[str, Any]]:
            first = {**index, "id": "a", "function": {"name": "t", "arguments": '{"n":'}}
            rest = {**index, "function": {"arguments": "1}"}}
            other = {**index, "id": "b", "function": {"name": "u", "arguments": "{}"}}
            return [openai_delta(tool_calls=[part]) for part in (first, rest, other)]

        for events in (parts(), parts(index=0)):
            assert turn("x", raw=data(*events, *OPENAI_END)).calls == [
                ToolCall("a", "t", '{"n":1}'),
                ToolCall("b", "u", "{}"),
            ]

    def test_missing_and_repeated_ids_become_unique_in_the_transcript(self, turn):
        calls = [
            {"index": at, "id": call_id, "function": {"name": "t"}} for at, call_id in enumerate(["a", None, "a", "b"])
        ]
        earlier = AssistantMessage("", (ToolCall("b", "t", "{}"), ToolCall("call_2_2", "t", "{}")))
        heard = turn("x", "Hi", earlier, raw=data(openai_delta(tool_calls=calls), *OPENAI_END), turn_index=2)

        ids = [call.id for call in heard.calls]
        assert ids[0] == "a"
        assert len({*ids, "b", "call_2_2"}) == 6
        assert all(ids)

    def test_a_call_without_a_name_is_an_error(self, turn):
        raw = data(openai_delta(tool_calls=[{"index": 0, "id": "a", "function": {"arguments": "{}"}}]), *OPENAI_END)

        assert "without naming" in failure(turn, "x", raw=raw).message

    @pytest.mark.parametrize(
        "delta",
        [{"content": ["x"]}, {"content": 1}, {"tool_calls": [{"index": 0, "function": {"arguments": {"a": 1}}}]}],
    )
    def test_fields_of_the_wrong_type_are_malformed(self, turn, delta: dict[str, Any]):
        assert "malformed" in failure(turn, "x", raw=data(openai_delta(**delta), *OPENAI_END)).message

    @pytest.mark.parametrize("count", [-1, 10**12, "5", None, True, 1.5])
    def test_counts_that_can_not_be_are_estimated(self, turn, count: Any):
        usage = {"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": count}}

        assert turn("x", "Hi!!", raw=data(openai_delta(content="okay"), usage, *OPENAI_END)).usage == Usage(1, 1)

    def test_carriage_returns_comments_and_a_missing_last_line(self, turn):
        lines = b"".join([b": ping\r\n\r\n", *data(openai_delta(content="hi"), OPENAI_END[0])]).replace(b"\n", b"\r\n")

        assert turn("x", raw=[lines]).text == "hi"

    def test_a_server_of_ones_own_needs_no_key_and_openai_does(self, serve, settings):
        async def main(server: ModelServer) -> str:
            settings.OPENAI_API_KEY = ""
            return (await hear(client_for("openai"), request_of("Hi"))).text

        assert serve(main) == GREETING

        async def at_openai(server: ModelServer) -> None:
            settings.OPENAI_API_KEY, settings.OPENAI_BASE_URL = "", "https://api.openai.com/v1/"
            client_for("openai")

        with pytest.raises(ModelError, match="OPENAI_API_KEY is missing"):
            serve(at_openai)


@pytest.mark.parametrize(
    ("key", "url", "says"),
    [
        (f"{KEY}\n", "", "API_KEY holds a character"),
        ("schlüssel", "", "API_KEY holds a character"),
        (KEY, "localhost", "BASE_URL"),
        (KEY, "http://user:Very5ecret@[", "BASE_URL"),
    ],
)
def test_settings_that_can_not_work_are_named(serve, settings, provider: str, key: str, url: str, says: str):
    async def main(server: ModelServer) -> None:
        setattr(settings, f"{provider.upper()}_API_KEY", key)
        setattr(settings, f"{provider.upper()}_BASE_URL", url or server.url)
        await hear(client_for(provider), request_of("Hi"))

    with pytest.raises(ModelError, match=says) as caught:
        serve(main)
    assert "Very5ecret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_anthropic_without_a_key_is_not_set_up(serve, settings):
    async def main(server: ModelServer) -> None:
        settings.ANTHROPIC_API_KEY = ""
        client_for("anthropic")

    with pytest.raises(ModelError, match="ANTHROPIC_API_KEY is missing"):
        serve(main)


def test_the_key_goes_to_the_provider_and_nowhere_else(serve, provider: str):
    async def main(server: ModelServer) -> dict[str, str]:
        await hear(client_for(provider), request_of("Hi"))
        assert "Very5ecret" not in repr(client_for(provider)) + json.dumps(server.requests[0].body)
        return server.requests[0].headers

    assert [name for name, value in serve(main).items() if KEY in value] in (["authorization"], ["x-api-key"])


def test_preloading_leaves_out_what_is_not_set_up(settings, monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []
    monkeypatch.setattr("runs.agent.models.import_string", loaded.append)
    settings.OPENAI_API_KEY, settings.OPENAI_BASE_URL = "", "https://api.openai.com/v1"
    settings.ANTHROPIC_API_KEY = KEY

    preload()

    assert loaded == ["runs.agent.demo.DemoModel", "runs.agent.anthropic_model.AnthropicModel"]
