"""Tests of deviations in the answers of servers with a chat completions API, of profiles, and of servers that are not
set up.
"""

import traceback
from typing import Any

import pytest

from runs.catalogue.definitions import Dialect, Server, dialect_of
from runs.errors import FailureReason
from runs.llm import wire
from runs.llm.base import AssistantMessage, ModelError, ToolCall, Usage
from runs.llm.registry import client_for
from tests.llm.helpers import KEY, OPENAI_END, at, client_of, data, failure, hear, model_of, openai_delta, request_of
from tests.llm.model_server import ModelServer
from tests.llm.wire_formats import GREETING


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

    @pytest.mark.parametrize("other_id", ["a", "b"], ids=["the same", "another"])
    @pytest.mark.parametrize("index", [{}, {"index": 0}], ids=["without index", "with index"])
    def test_a_part_with_an_id_and_without_a_name_begins_no_call(self, turn, index: dict[str, Any], other_id: str):
        first = {**index, "id": "a", "function": {"name": "t", "arguments": '{"n":'}}
        rest = {**index, "id": other_id, "function": {"arguments": "1}"}}
        raw = data(*[openai_delta(tool_calls=[part]) for part in (first, rest)], *OPENAI_END)

        assert turn("x", raw=raw).calls == [ToolCall("a", "t", '{"n":1}')]

    @pytest.mark.parametrize("same", [{}, {"index": 0}, {"index": 0, "id": ""}])
    def test_whole_calls_without_ids_are_distinguished(self, turn, same: dict[str, Any]):
        """As some servers send Gemini's: the same index, and no id."""
        calls = [{"name": "t", "arguments": '{"n":1}'}, {"name": "t", "arguments": '{"n":2}'}, {"name": "u"}]
        raw = data(*[openai_delta(tool_calls=[same | {"function": call}]) for call in calls], *OPENAI_END)

        assert [(call.name, call.arguments) for call in turn("x", raw=raw).calls] == [
            ("t", '{"n":1}'),
            ("t", '{"n":2}'),
            ("u", "{}"),
        ]

    def test_broken_arguments_are_parsed_once_however_many_names_follow(self, turn, monkeypatch):
        """Parsing them takes 2 ms of the event loop, and a server can send thousands of names."""
        parsed: list[str] = []
        parse = wire.arguments_object
        monkeypatch.setattr(wire, "arguments_object", lambda text: parsed.append(text) or parse(text))
        broken = {"function": {"name": "t", "arguments": '{"a":'}}
        raw = data(openai_delta(tool_calls=[broken, *[{"function": {"name": "t"}}] * 100]), *OPENAI_END)

        assert [call.name for call in turn("x", raw=raw).calls] == ["t"]
        assert parsed == ['{"a":']

    def test_a_name_that_comes_with_each_part_begins_no_call(self, turn):
        parts = [{"index": 0, "function": {"name": "t", "arguments": text}} for text in ("", '{"n":', "1}", "")]
        raw = data(*[openai_delta(tool_calls=[part]) for part in parts], *OPENAI_END)

        assert [(call.name, call.arguments) for call in turn("x", raw=raw).calls] == [("t", '{"n":1}')]

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

        assert failure(turn, "x", raw=raw).reason is FailureReason.MALFORMED_ANSWER

    @pytest.mark.parametrize(
        "delta",
        [
            {"content": ["x"]},
            {"content": 1},
            {"content": {"text": "x"}},
            {"tool_calls": [{"index": 0, "id": 7}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": [1]}}]},
        ],
    )
    def test_fields_of_the_wrong_type_are_malformed(self, turn, delta: dict[str, Any]):
        error = failure(turn, "x", raw=data(openai_delta(**delta), *OPENAI_END))
        assert error.reason is FailureReason.MALFORMED_ANSWER

    def test_arguments_as_an_object_become_text(self, turn):
        part = {"index": 0, "id": "a", "function": {"name": "t", "arguments": {"a": 1}}}

        assert turn("x", raw=data(openai_delta(tool_calls=[part]), *OPENAI_END)).calls == [
            ToolCall("a", "t", '{"a":1}')
        ]

    @pytest.mark.parametrize(
        "reason", ["error", "abort", "insufficient_system_resource", "function_call_filter: MALFORMED_FUNCTION_CALL"]
    )
    def test_a_provider_that_stops_within_the_answer_is_unavailable(self, turn, reason: str):
        assert failure(turn, f"finish={reason}").reason is FailureReason.PROVIDER_UNAVAILABLE

    @pytest.mark.parametrize("reason", ["content_filter: RECITATION", "PROHIBITED_CONTENT", "SAFETY"])
    def test_the_names_that_gemini_has_for_its_filters(self, turn, reason: str):
        assert failure(turn, f"finish={reason}").reason is FailureReason.CONTENT_FILTERED

    def test_counts_after_the_finish_reason_are_read(self, turn):
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}}
        raw = data(openai_delta(content="x"), OPENAI_END[0], {"choices": [], "usage": usage})

        assert turn("x", raw=raw).usage == Usage(7, 3, reasoning_tokens=2)

    @pytest.mark.parametrize(
        ("total", "details", "expected"),
        [
            (135, {"completion_tokens_details": {"reasoning_tokens": 94}}, Usage(32, 103, reasoning_tokens=94)),
            (135, {}, Usage(32, 103)),
            (41, {"completion_tokens_details": {"reasoning_tokens": 5}}, Usage(32, 9, reasoning_tokens=5)),
            (51, {"prompt_tokens_details": {"cached_tokens": 10}}, Usage(32, 9, cached_tokens=10)),
        ],
        ids=["xAI", "Gemini", "OpenAI", "a cache in the total"],
    )
    def test_reasoning_that_only_the_total_counts_is_output(self, turn, total: int, details: Any, expected: Usage):
        usage = {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": total} | details
        raw = data(openai_delta(content="x"), {"choices": [], "usage": usage}, *OPENAI_END)

        assert turn("x", raw=raw).usage == expected

    @pytest.mark.parametrize("count", [-1, 10**12, "5", None, True, 1.5])
    def test_impossible_token_counts_are_replaced_by_estimates(self, turn, count: Any):
        usage = {"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": count}}

        assert turn("x", "Hi!!", raw=data(openai_delta(content="okay"), usage, *OPENAI_END)).usage == Usage(
            1, 1, estimated=True
        )

    def test_carriage_returns_comments_and_a_missing_last_line(self, turn):
        lines = b"".join([b": ping\r\n\r\n", *data(openai_delta(content="hi"), OPENAI_END[0])]).replace(b"\n", b"\r\n")

        assert turn("x", raw=[lines]).text == "hi"


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_items_without_an_index_are_distinguished_by_id(turn):
    """As llama.cpp sends them."""
    call = {"type": "function_call", "call_id": "fc_1", "name": "calculate", "arguments": ""}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
    usage = {"input_tokens": 21, "output_tokens": 13}
    events = [
        {"type": "response.output_item.added", "item": message},
        {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "Let me see."},
        {"type": "response.output_item.added", "item": call},
        {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "delta": '{"a":'},
        {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "delta": "1}"},
        {"type": "response.output_item.added", "item": call | {"call_id": "fc_2"}},
        {"type": "response.output_item.done", "item": message},
        {"type": "response.output_item.done", "item": call | {"arguments": '{"a":1}'}},
        {"type": "response.output_item.done", "item": call | {"call_id": "fc_2", "arguments": "{}"}},
        {"type": "response.completed", "response": {"status": "completed", "usage": usage}},
    ]
    heard = turn("x", raw=data(*events))
    assert heard.text == "Let me see."
    assert heard.calls == [ToolCall("fc_1", "calculate", '{"a":1}'), ToolCall("fc_2", "calculate", "{}")]


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_an_answer_that_comes_whole_with_its_end(turn):
    """Some servers accept ``stream`` and stream nothing."""
    call = {"type": "function_call", "call_id": "fc_1", "name": "calculate", "arguments": "{}"}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    response = {"status": "completed", "output": [message, call], "usage": {"input_tokens": 21, "output_tokens": 13}}
    heard = turn("x", raw=data({"type": "response.completed", "response": response}))
    assert (heard.text, heard.calls) == ("Let me see.", [ToolCall("fc_1", "calculate", "{}")])


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"api_key": f"{KEY}\n"}, FailureReason.PROVIDER_MISSING, "key holds a character"),
        ({"api_key": "schlüssel"}, FailureReason.PROVIDER_MISSING, "key holds a character"),
        ({"base_url": "localhost"}, FailureReason.PROVIDER_MISSING, "address"),
        ({"base_url": "http://user:Very5ecret@["}, FailureReason.PROVIDER_MISSING, "address"),
        (
            {"base_url": "https://api.openai.com/v1", "api_key": ""},
            FailureReason.PROVIDER_KEY_MISSING,
            "key is missing",
        ),
        ({"base_url": "https://x.openai.azure.com/openai/v1", "api_key": ""}, FailureReason.PROVIDER_KEY_MISSING, ""),
    ],
)
def test_a_server_that_is_not_set_up_is_an_error(
    serve, provider: str, fields: dict[str, str], reason: FailureReason, says: str
):
    async def main(server: ModelServer) -> None:
        client_for(at(server.url, provider, **fields))

    with pytest.raises(ModelError) as caught:
        serve(main)
    assert caught.value.reason is reason
    assert says in caught.value.detail
    assert "Very5ecret" not in "".join(traceback.format_exception(caught.value)) + caught.value.detail


def test_a_server_of_ones_own_needs_no_key(serve, provider: str):
    async def main(server: ModelServer) -> tuple[str, dict[str, str]]:
        model = model_of(at(server.url, provider, api_key=""))
        text = (await hear(client_for(model.server), request_of("Hi", model=model))).text
        return text, server.requests[0].headers

    text, headers = serve(main)
    assert text == GREETING
    assert not {"authorization", "x-api-key", "api-key"} & headers.keys()


def test_azure_gets_its_own_header(provider: str):
    client = client_of(at("", provider, base_url="https://x.openai.azure.com/openai/v1"))
    name = "x-api-key" if provider == "anthropic" else "api-key"
    assert [header for header, value in client.headers.items() if KEY in value] == [name]


def test_a_changed_server_gets_a_new_client(serve, provider: str):
    async def main(server: ModelServer) -> None:
        old, new = at(server.url, provider), at(server.url, provider, api_key="sk-other-key")
        client = client_for(old)
        assert client_for(old) is client
        assert client_for(new) is not client

    serve(main)


# --- profiles --------------------------------------------------------------------------------------------------------


def dialect(kind: str, url: str, model: str) -> Dialect:
    return dialect_of(Server("x", kind, url), model, {})


OPENAI, MISTRAL = "https://api.openai.com/v1", "https://api.mistral.ai/v1"


@pytest.mark.parametrize(
    ("model", "tools_effort", "sampling", "role"),
    [
        ("gpt-4o-mini", "", True, "system"),
        ("gpt-4.1", "", True, "system"),
        ("gpt-5-chat-latest", "", True, "system"),
        ("gpt-5.1-chat-latest", "", True, "system"),
        ("o3", "", False, "developer"),
        ("o4-mini", "", False, "developer"),
        ("gpt-5", "", False, "developer"),
        ("gpt-5-mini-2025-08-07", "", False, "developer"),
        ("gpt-5.4", "none", False, "developer"),
        ("gpt-6-astra", "none", False, "developer"),
    ],
)
def test_models_of_openai(model: str, tools_effort: str, sampling: bool, role: str):
    found = dialect("openai", OPENAI, model)
    assert (found.effort_with_tools, found.sampling, found.system_role) == (tools_effort, sampling, role)
    assert (found.max_tokens_field, found.prompt_cache_key) == ("max_completion_tokens", True)
    responses = dialect("openai_responses", OPENAI, model)
    assert (responses.sampling, responses.reasoning_back) == (sampling, True)


@pytest.mark.parametrize(
    ("model", "adaptive", "sampling"),
    [
        ("claude-3-5-haiku-20241022", False, True),
        ("claude-opus-4-20250514", False, True),
        ("claude-haiku-4-5-20251001", False, True),
        ("claude-sonnet-4-6", True, True),
        ("claude-opus-4-7", True, False),
        ("anthropic.claude-opus-4-8", True, False),
        ("claude-sonnet-5", True, False),
        ("claude-mythos-preview", True, False),
        ("deepseek-chat", False, True),
    ],
)
def test_models_of_anthropic(model: str, adaptive: bool, sampling: bool):
    found = dialect("anthropic", "https://api.anthropic.com", model)
    assert (found.adaptive_thinking, found.sampling) == (adaptive, sampling)
    assert (found.reasoning_back, found.prompt_cache_key) == (True, True)


def test_other_services():
    mistral = dialect("openai", MISTRAL, "mistral-large-latest")
    assert (mistral.max_tokens_field, mistral.stream_options, mistral.call_id_length) == ("max_tokens", False, 9)
    assert (mistral.seed_field, mistral.tool_images) == ("random_seed", False)
    deepseek = dialect("openai", "https://api.deepseek.com/v1", "deepseek-v4-pro")
    assert (deepseek.reasoning_field, deepseek.reasoning_back) == ("reasoning_content", True)
    assert (deepseek.image_input, deepseek.file_input) == (False, False)
    assert dialect("openai", "http://127.0.0.1:8000/v1", "deepseek-r1").reasoning_back
    assert dialect("openai", "https://api.moonshot.ai/v1", "kimi-k3").reasoning_back
    assert not dialect("openai", "https://api.groq.com/openai/v1", "deepseek-r1-distill-llama-70b").reasoning_back
    router = dialect("openai", "https://openrouter.ai/api/v1", "anthropic/claude-opus-4.7")
    assert (router.reasoning_field, router.reasoning_back, router.file_input) == ("reasoning_details", True, True)
    gemini = dialect("openai", "https://generativelanguage.googleapis.com/v1beta/openai", "gemini-3-flash")
    assert (gemini.reasoning_field, gemini.reasoning_back) == ("extra_content", True)
    vllm = dialect("openai", "http://127.0.0.1:8000/v1", "llama")
    assert (vllm.image_input, vllm.file_input, vllm.reasoning_back) == (True, False, False)


def test_what_staff_set_comes_before_the_profile():
    server = Server("x", "openai", MISTRAL)
    assert dialect_of(server, "m", {"callIdLength": 0, "streamOptions": True}) == Dialect(
        reasoning_field="", seed_field="random_seed", tool_images=False, file_input=False
    )
    for wrong in ({"callIdLength": "9"}, {"seedField": "x"}, {"toolImages": 1}, {"unknown": True}, []):
        with pytest.raises(ValueError):  # noqa: PT011
            dialect_of(server, "m", wrong)  # type: ignore[arg-type]
