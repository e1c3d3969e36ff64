"""Tests of deviations in the answers of servers with a chat completions API, and of invalid settings."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest

from runs.llm.base import AssistantMessage, ModelError, ToolCall, Usage
from runs.llm.registry import client_for, preload
from tests.llm.conftest import KEY
from tests.llm.helpers import OPENAI_END, data, failure, hear, openai_delta, request_of
from tests.llm.model_server import GREETING, ModelServer


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
class TestOpenAIDialects:
    def test_split_and_lone_surrogates(self, turn):
        halves = [openai_delta(content=text) for text in ("a\x00\ud83e", "\udd8a", "b\udd8ac", "\ud83e")]
        heard = turn("x", raw=data(*halves, *OPENAI_END))

        assert heard.text == "a🦊b\ufffdc\ufffd"
        heard.text.encode()

    def test_ids_names_and_arguments_are_cleaned_and_limited(self, turn):
        part = {"index": 0, "id": "i\ud800\x00" * 300, "function": {"name": "n\x00" * 300, "arguments": '"\x00\ud83e'}}
        more = {"index": 0, "function": {"arguments": '\udd8a"'}}
        (call,) = turn(
            "x", raw=data(openai_delta(tool_calls=[part]), openai_delta(tool_calls=[more]), *OPENAI_END)
        ).calls

        assert call == ToolCall(("i\ufffd" * 100), "n" * 200, '"🦊"')

    def test_calls_without_a_unique_index_are_distinguished_by_id(self, turn):
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

        assert "without a name" in failure(turn, "x", raw=raw).message

    @pytest.mark.parametrize(
        "delta",
        [{"content": ["x"]}, {"content": 1}, {"tool_calls": [{"index": 0, "function": {"arguments": {"a": 1}}}]}],
    )
    def test_fields_of_the_wrong_type_are_malformed(self, turn, delta: dict[str, Any]):
        assert "malformed" in failure(turn, "x", raw=data(openai_delta(**delta), *OPENAI_END)).message

    @pytest.mark.parametrize("count", [-1, 10**12, "5", None, True, 1.5])
    def test_impossible_token_counts_are_replaced_by_estimates(self, turn, count: Any):
        usage = {"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": count}}

        assert turn("x", "Hi!!", raw=data(openai_delta(content="okay"), usage, *OPENAI_END)).usage == Usage(1, 1)

    def test_carriage_returns_comments_and_a_missing_last_line(self, turn):
        lines = b"".join([b": ping\r\n\r\n", *data(openai_delta(content="hi"), OPENAI_END[0])]).replace(b"\n", b"\r\n")

        assert turn("x", raw=[lines]).text == "hi"

    def test_custom_server_needs_no_key_and_openai_needs_one(self, serve, settings):
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
def test_error_names_the_invalid_setting(serve, settings, provider: str, key: str, url: str, says: str):
    async def main(server: ModelServer) -> None:
        setattr(settings, f"{provider.upper()}_API_KEY", key)
        setattr(settings, f"{provider.upper()}_BASE_URL", url or server.url)
        await hear(client_for(provider), request_of("Hi"))

    with pytest.raises(ModelError, match=says) as caught:
        serve(main)
    assert "Very5ecret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
def test_anthropic_without_a_key_is_not_configured(serve, settings):
    async def main(server: ModelServer) -> None:
        settings.ANTHROPIC_API_KEY = ""
        client_for("anthropic")

    with pytest.raises(ModelError, match="ANTHROPIC_API_KEY is missing"):
        serve(main)


def test_key_is_sent_only_to_the_provider(serve, provider: str):
    async def main(server: ModelServer) -> dict[str, str]:
        await hear(client_for(provider), request_of("Hi"))
        assert "Very5ecret" not in repr(client_for(provider)) + json.dumps(server.requests[0].body)
        return server.requests[0].headers

    assert [name for name, value in serve(main).items() if KEY in value] in (["authorization"], ["x-api-key"])


def test_preloading_skips_providers_that_are_not_configured(settings, monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []
    monkeypatch.setattr("runs.llm.registry.import_string", loaded.append)
    settings.OPENAI_API_KEY, settings.OPENAI_BASE_URL = "", "https://api.openai.com/v1"
    settings.ANTHROPIC_API_KEY = KEY

    preload()

    assert loaded == ["runs.llm.demo.DemoModel", "runs.llm.anthropic.AnthropicModel"]
