"""The adapters with model servers of other projects: LiteLLM's proxy, and llama.cpp's server with real weights."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.outbound.transport import close_sessions
from runs.catalogue.definitions import KINDS, Server
from runs.errors import FailureReason
from runs.llm.base import AssistantMessage, ModelError, ToolCall, ToolMessage, UserMessage
from runs.llm.measure import measure, upper_bound
from runs.llm.registry import client_for
from tests.llm.helpers import CALCULATE, Heard, hear, model_of, request_of
from tests.llm.real_servers import litellm_proxy, llama_server
from tests.llm.wire_formats import ENCRYPTED
from tests.stack.process import Process, free_port, python, wait_for

# The servers are installed in the time of the first test.
pytestmark = [pytest.mark.services, pytest.mark.stack, pytest.mark.timeout(600)]

NETWORK_KINDS = [name for name, kind in KINDS.items() if not kind.is_offline]
CALL = ToolCall("call_1", "calculate", '{"expression": "2*3"}')
WITH_RESULT = ("Compute 2*3.", AssistantMessage("", (CALL,)), ToolMessage("call_1", "6", is_error=False))


def ask(server: Server, model: str, *messages: Any, **fields: Any) -> Heard:
    definition = model_of(server, model, parameters={"temperature": 0})

    async def main() -> Heard:
        try:
            return await hear(
                client_for(server), request_of(*(messages or ("Say hello.",)), model=definition, **fields)
            )
        finally:
            await close_sessions()

    return asyncio.run(main())


def refusal(server: Server, model: str, *messages: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask(server, model, *messages)
    return caught.value


@pytest.fixture(scope="module")
def llama_url() -> Iterator[str]:
    with llama_server() as url:
        yield url


@pytest.fixture(params=NETWORK_KINDS)
def llama(llama_url: str, request: pytest.FixtureRequest) -> Server:
    return Server("llama", request.param, f"{llama_url}/v1")


def test_llama_answers(llama: Server) -> None:
    heard = ask(llama, "smollm2", max_output_tokens=8)
    assert heard.text
    assert not heard.usage.estimated
    assert 0 < heard.usage.output_tokens <= 8
    assert heard.end.finish_reason == ("length" if heard.usage.output_tokens == 8 else "stop")


def test_llama_accepts_tools_and_results(llama: Server) -> None:
    """The weights are too small for a call of their own."""
    heard = ask(llama, "smollm2", *WITH_RESULT, tools=(CALCULATE,), max_output_tokens=8)
    assert heard.text or heard.calls


def counted(server: Server, request: Any) -> int:
    heard = ask(server, "smollm2", *request.messages, tools=request.tools, max_output_tokens=1)
    return heard.usage.input_tokens


LONGER = [
    ("Hi", AssistantMessage("Hello!"), UserMessage("What is 2*3? " * 20)),
    ("Grüße 🦊🦊 \u200b ∑∂ 漢字" * 5, AssistantMessage("ok"), UserMessage("\n\n\t  x  \n" * 30)),
    (*WITH_RESULT, AssistantMessage("6"), UserMessage("And 3*3?")),
]


@pytest.mark.parametrize("messages", LONGER, ids=range(len(LONGER)))
def test_what_llama_counts_of_a_beginning_bounds_what_it_counts_of_more(llama: Server, messages: Any) -> None:
    """The counts of a request and of the bytes that are added later may be added."""
    if llama.kind == "openai_responses":
        # Its Responses API takes no text of an assistant as OpenAI's does.
        messages = [message for message in messages if not isinstance(message, AssistantMessage) or message.tool_calls]
    definition = model_of(llama, "smollm2", parameters={"temperature": 0})
    requests = [
        request_of(*messages[:length], model=definition, tools=(CALCULATE,))
        for length in range(1, len(messages) + 1)
        if not isinstance(messages[length - 1], AssistantMessage)
    ]
    known: dict[str, int] = {}
    for request in requests:
        tokens = counted(llama, request)
        assert tokens <= upper_bound(request, known)
        beginnings = measure(request).beginnings
        known |= {beginnings[0][0]: tokens, beginnings[-1][0]: tokens}
    assert len(known) >= 2


def test_llama_counts_before_a_request_no_less_than_after_it(llama_url: str) -> None:
    server = Server("llama", "anthropic", f"{llama_url}/v1")
    request = request_of("Say hello. " * 30, model=model_of(server, "smollm2"), tools=(CALCULATE,))

    async def ahead() -> int | None:
        try:
            return await client_for(server).count(request)
        finally:
            await close_sessions()

    before, after = asyncio.run(ahead()), counted(server, request)
    assert before is not None
    assert after <= before <= 1.1 * after + 60


def test_llama_refuses_too_long_a_request(llama: Server) -> None:
    error = refusal(llama, "smollm2", UserMessage("word " * 3000))
    assert (error.reason, error.status) == (FailureReason.CONTEXT_TOO_LONG, 400)
    assert "context size" in error.detail


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log: Path = tmp_path_factory.mktemp("upstream") / "log"
    process = Process("upstream", python("-m", "tests.llm.model_server", "--port", str(port)), log=log)
    process.start()
    try:
        wait_for(lambda: process.check() or process.tail(), 60, "the start of the model server")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()


@pytest.fixture(scope="module")
def proxy(upstream: str) -> Iterator[tuple[str, str]]:
    with litellm_proxy(upstream) as running:
        yield running


@pytest.fixture(params=NETWORK_KINDS)
def litellm(proxy: tuple[str, str], request: pytest.FixtureRequest) -> Server:
    url, key = proxy
    return Server("litellm", request.param, f"{url}/v1", key)


def test_litellm_answers(litellm: Server) -> None:
    heard = ask(litellm, "plain")
    assert heard.text == "Hello from the server behind it."
    assert heard.end.finish_reason == "stop"
    assert not heard.usage.estimated


# It has no mock answers for streams of the Responses API.
WITH_MOCKS = pytest.mark.parametrize("litellm", ["openai", "anthropic"], indirect=True)


@WITH_MOCKS
def test_litellm_sends_mock_answers(litellm: Server) -> None:
    assert ask(litellm, "mock-plain").text == "Hello from LiteLLM."


def test_litellm_calls_a_tool_and_gets_its_result(litellm: Server) -> None:
    heard = ask(litellm, "tool", "Compute 6*7.", tools=(CALCULATE,))
    (call,) = heard.calls
    assert (call.name, call.arguments.replace(" ", "")) == ("calculate", '{"expression":"6*7"}')
    assert heard.end.finish_reason == "tool_calls"
    result = ToolMessage(call.id, "the result is 42", is_error=False)
    heard = ask(litellm, "tool", "Compute 6*7.", heard.turn, result, tools=(CALCULATE,), turn_index=2)
    assert (heard.text, heard.calls) == ("the result is 42", [])


@pytest.mark.parametrize("litellm", ["openai_responses"], indirect=True)
def test_encrypted_reasoning_goes_through_litellm_and_back(litellm: Server) -> None:
    heard = ask(litellm, "thinker", "Compute 6*7.", tools=(CALCULATE,))
    assert [kept["item"]["encrypted_content"] for kept in heard.end.reasoning] == [ENCRYPTED]
    result = ToolMessage(heard.calls[0].id, "the result is 42", is_error=False)
    heard = ask(litellm, "thinker", "Compute 6*7.", heard.turn, result, tools=(CALCULATE,), turn_index=2)
    assert heard.text == "the result is 42"


def test_counts_that_litellm_does_not_report_are_estimated(litellm: Server) -> None:
    usage = ask(litellm, "uncounted").usage
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0


def assert_reason(server: Server, model: str, reason: FailureReason) -> None:
    error = refusal(server, model)
    assert error.reason == reason
    assert error.detail


@WITH_MOCKS
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("mock-overflow", FailureReason.CONTEXT_TOO_LONG),
        ("mock-limited", FailureReason.PROVIDER_RATE_LIMITED),
        ("mock-broken", FailureReason.PROVIDER_UNAVAILABLE),
    ],
)
def test_mock_errors_of_litellm_have_their_reason(litellm: Server, model: str, reason: FailureReason) -> None:
    assert_reason(litellm, model, reason)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("limited", FailureReason.PROVIDER_RATE_LIMITED), ("broken", FailureReason.PROVIDER_UNAVAILABLE)],
)
def test_errors_behind_litellm_have_their_reason(litellm: Server, model: str, reason: FailureReason) -> None:
    assert_reason(litellm, model, reason)


def test_litellm_does_not_know_a_model(litellm: Server) -> None:
    assert_reason(litellm, "gone", FailureReason.MODEL_UNKNOWN)


def test_litellm_refuses_a_wrong_key(litellm: Server) -> None:
    """Without a database, it says 400 instead of 401."""
    key = "sk-wrong-Very5ecretKey0123456789"
    error = refusal(replace(litellm, api_key=key), "plain")
    assert error.status in (400, 401)
    assert key not in error.detail
