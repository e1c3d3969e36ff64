"""Tests of the failures of a turn with a network provider."""

from __future__ import annotations

import asyncio
import logging
import traceback

import pytest

from runs.llm.base import ModelError, ModelTimeout, TextDelta
from runs.llm.registry import client_for
from tests.llm.helpers import Heard, data, failure, hear, request_of
from tests.llm.model_server import GREETING, ModelServer


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
    + [(status, "internal error") for status in (500, 503, 529)],
)
def test_provider_error_names_the_remedy_and_not_the_key(turn, caplog, status: int, says: str):
    caplog.set_level(logging.DEBUG)
    error = failure(turn, f"status={status}")

    assert error.code == "MODEL_ERROR"
    assert says in error.message
    assert "Very5ecret" not in "".join(traceback.format_exception(error)) + repr(error)
    assert "Very5ecret" not in caplog.text


def test_keys_in_a_provider_message_are_redacted(turn):
    error = failure(turn, "x", raw=data({"error": {"message": "Bad sk-live***6789 at //me:pass@host, Bearer abc"}}))

    assert error.message.endswith("Bad [key] at [key]host, [key]")


@pytest.mark.parametrize("fault", ["cut", "malformed", "no_end", "error", "html"])
def test_incomplete_turn_is_an_error(turn, caplog, fault: str):
    error = failure(turn, f"fault={fault}")

    assert error.code == "MODEL_ERROR"
    assert "Very5ecret" not in caplog.text + "".join(traceback.format_exception(error))


def test_text_before_a_lost_connection_is_emitted(serve, provider: str):
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
    assert "sent nothing" in error.message


def test_very_slow_answer_times_out_the_turn(turn, settings):
    settings.MODEL_TIMEOUT_SECONDS, settings.MODEL_STALL_SECONDS = 0.5, 0.4

    error = failure(turn, "fault=drip")
    assert isinstance(error, ModelTimeout)
    assert "longer than 0.5 seconds" in error.message


def test_output_and_calls_are_limited(turn, settings):
    settings.MODEL_OUTPUT_MAX_CHARS = 1000
    assert "1000 characters" in failure(turn, "fault=flood").message
    assert "1000 characters" in failure(turn, f'call=t&args={{"a":"{"x" * 1000}"}}').message

    settings.TOOL_CALLS_PER_TURN_MAX = 2
    assert len(turn("call=a&call=b").calls) == 2
    assert "more than 2 tools" in failure(turn, "call=a&call=b&call=c").message


def test_an_event_without_end_is_an_error(turn, settings):
    settings.MODEL_EVENT_MAX_BYTES = 1000

    assert "too long" in failure(turn, "x", raw=[b"data: " + b"x" * 600, b"x" * 600]).message
    assert "too long" in failure(turn, "x", raw=[b"data: " + b"x" * 600 + b"\n"] * 2).message


@pytest.mark.parametrize(
    "event", ["[]", "1", '"x"', "{", "[" * 100_000, b"\xff\xfe".decode("latin-1"), '{"type": []}{']
)
def test_an_event_of_the_wrong_shape_is_malformed(turn, event: str):
    assert "malformed" in failure(turn, "x", raw=[f"data: {event}\n\n".encode()]).message


def test_unreachable_server_is_an_error(serve, provider: str, caplog):
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


def test_closing_the_turn_early_closes_the_connection(serve, provider: str):
    async def main(server: ModelServer) -> None:
        events = client_for(provider).stream(request_of("Hi", model="chunks=1000&ms=20"))
        assert isinstance(await anext(events), TextDelta)
        await events.aclose()
        await asyncio.wait_for(server.requests[0].closed_by_client.wait(), 5)

    serve(main)
