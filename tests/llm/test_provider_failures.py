"""Tests of failures of a turn with a network provider that test_model_faults.py has no server for."""

import asyncio

import pytest

from runs.errors import FailureReason
from runs.llm import http
from runs.llm.base import ModelError
from runs.llm.registry import client_for
from tests.llm.helpers import KEY, Heard, at, data, failure, hear, model_of, request_of
from tests.llm.model_server import ModelServer
from tests.llm.wire_formats import GREETING


def test_keys_in_a_provider_message_are_redacted(turn):
    message = "Bad sk-live-6789 gsk_abcdefgh xx***6789 at //me:pass@host, Bearer abc and desk-topping"
    error = failure(turn, "x", raw=data({"error": {"message": message}}))

    assert error.detail == "Bad [key] [key] [key] at [key]host, [key] and desk-topping"


def test_secrets_of_headers_in_a_provider_message_are_redacted(serve, provider: str):
    async def main(server: ModelServer) -> None:
        server.raw = data({"type": "error", "error": {"message": "no tokenABC or Basic dXNlcjpwYXNz"}})
        headers = (("X-Auth", "tokenABC"), ("Authorization", "Basic dXNlcjpwYXNz"))
        model = model_of(at(server.url, provider, headers=headers))
        await hear(client_for(model.server), request_of("Hi", model=model))

    with pytest.raises(ModelError) as caught:
        serve(main)
    assert caught.value.detail == "no [key] or [key]"


@pytest.mark.parametrize("provider", ["openai_responses"], indirect=True)
def test_an_error_event_of_responses_hides_the_key(turn):
    event = {"type": "error", "code": "rate_limit_exceeded", "message": f"Slow down, {KEY}", "param": None}
    error = failure(turn, "x", raw=data(event))

    assert (error.reason, error.detail) == (FailureReason.PROVIDER_RATE_LIMITED, "Slow down, [key]")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"type": "overloaded_error"}, FailureReason.PROVIDER_UNAVAILABLE),
        ({"type": "rate_limit_error"}, FailureReason.PROVIDER_RATE_LIMITED),
        ({"type": "invalid_request_error"}, FailureReason.REQUEST_REFUSED),
        ({"type": "authentication_error"}, FailureReason.PROVIDER_UNAUTHORIZED),
        ({"type": "billing_error"}, FailureReason.PROVIDER_QUOTA_EXCEEDED),
        ({"code": "context_length_exceeded"}, FailureReason.CONTEXT_TOO_LONG),
        ({"code": "bio_policy"}, FailureReason.CONTENT_FILTERED),
        ({"code": 429}, FailureReason.PROVIDER_RATE_LIMITED),
        ({"code": "503"}, FailureReason.PROVIDER_UNAVAILABLE),
        ({}, FailureReason.PROVIDER_UNAVAILABLE),
    ],
)
def test_an_error_within_a_stream_has_its_reason(turn, error: dict[str, object], reason: FailureReason):
    assert failure(turn, "x", raw=data({"type": "error", "error": {"message": "No.", **error}})).reason is reason


def test_text_before_a_lost_connection_is_emitted(serve, provider: str):
    heard = Heard()

    async def main(server: ModelServer) -> None:
        model = model_of(at(server.url, provider), "fault=cut")
        await hear(client_for(model.server), request_of("Hi", model=model), heard)

    with pytest.raises(ModelError):
        serve(main)
    assert heard.text
    assert GREETING.startswith(heard.text)


@pytest.mark.parametrize("is_closed", [False, True])
def test_text_before_an_error_in_the_same_chunk_is_emitted(serve, provider: str, is_closed: bool):
    async def main(server: ModelServer) -> None:
        model = model_of(at(server.url, provider), "fault=malformed&split=100000")
        events = client_for(model.server).stream(request_of("Hi", model=model))
        assert GREETING.startswith(await anext(events))
        if is_closed:
            await events.aclose()
        else:
            with pytest.raises(ModelError):
                await anext(events)

    serve(main)


def test_a_connection_that_cannot_be_prepared_is_an_error(turn, monkeypatch):
    def unreadable() -> None:
        raise FileNotFoundError("/etc/ssl/cert.pem")

    monkeypatch.setattr("runs.llm.connection.tls_context", unreadable)
    error = failure(turn, "x")
    assert (error.reason, error.detail) == (FailureReason.CONNECTION_LOST, "FileNotFoundError")


def test_output_and_calls_are_limited(turn, monkeypatch):
    monkeypatch.setattr("runs.llm.base.MODEL_OUTPUT_MAX_CHARS", 1000)
    for wish in ("fault=flood", f'call=t&args={{"a":"{"x" * 1000}"}}', f"reason={'x' * 1000}"):
        assert failure(turn, wish).reason is FailureReason.ANSWER_TOO_LONG

    monkeypatch.setattr("runs.llm.base.TOOL_CALLS_PER_TURN_MAX", 2)
    assert len(turn("call=a&call=b").calls) == 2
    assert "more than 2 tools" in failure(turn, "call=a&call=b&call=c").message


@pytest.mark.parametrize("provider", ["anthropic"], indirect=True)
@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "redacted_thinking", "data": "", "more": "x" * 100},
        {"type": "tool_use", "id": "", "name": "", "input": {"a": "x" * 100}},
    ],
)
def test_the_memory_of_a_turn_is_limited_whatever_its_blocks_hold(turn, monkeypatch, block: dict[str, object]):
    monkeypatch.setattr("runs.llm.base.MODEL_OUTPUT_MAX_CHARS", 1000)
    blocks = [{"type": "content_block_start", "index": index, "content_block": block} for index in range(50)]

    assert failure(turn, "x", raw=data(*blocks)).reason is FailureReason.ANSWER_TOO_LONG


def test_an_event_without_end_is_an_error(turn, monkeypatch):
    monkeypatch.setattr("runs.llm.wire.MODEL_EVENT_MAX_BYTES", 1000)

    for raw in ([b"data: " + b"x" * 600, b"x" * 600], [b"data: " + b"x" * 600 + b"\n"] * 2):
        error = failure(turn, "x", raw=raw)
        assert (error.reason, error.detail) == (FailureReason.MALFORMED_ANSWER, "An event is too long.")


def test_a_document_without_end_is_an_error(turn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "DOCUMENT_MAX_BYTES", 1000)

    assert failure(turn, "x", raw=[b"{" + b" " * 600, b" " * 600]).reason is FailureReason.MALFORMED_ANSWER


@pytest.mark.parametrize(
    "event", ["[]", "1", '"x"', "{", "[" * 100_000, b"\xff\xfe".decode("latin-1"), '{"type": []}{']
)
def test_an_event_of_the_wrong_shape_is_malformed(turn, event: str):
    error = failure(turn, "x", raw=[f"data: {event}\n\n".encode()])
    assert error.reason is FailureReason.MALFORMED_ANSWER


@pytest.mark.parametrize("fault", ["stall", "stall_headers", "drip"])
def test_cancelling_the_turn_closes_the_connection(serve, provider: str, fault: str):
    async def main(server: ModelServer) -> None:
        model = model_of(at(server.url, provider), f"fault={fault}")
        task = asyncio.create_task(hear(client_for(model.server), request_of("Hi", model=model)))
        await asyncio.wait_for(server.asked.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.requests[0].closed_by_client.wait(), 5)

    serve(main)


def test_closing_the_turn_early_closes_the_connection(serve, provider: str):
    async def main(server: ModelServer) -> None:
        model = model_of(at(server.url, provider), "chunks=1000&ms=20")
        events = client_for(model.server).stream(request_of("Hi", model=model))
        assert isinstance(await anext(events), str)
        await events.aclose()
        await asyncio.wait_for(server.requests[0].closed_by_client.wait(), 5)

    serve(main)
