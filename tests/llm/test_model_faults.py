"""Each way in which a provider fails, for each kind, against a model server in its own process: the reason, whether
the same model is asked again, what the caller and staff read, and what becomes of the connection.
"""

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from config.outbound.transport import close_sessions
from runs.errors import FailureReason as Reason
from runs.llm.base import ModelError
from runs.llm.registry import client_for
from tests.llm.helpers import KEY, Heard, at, hear, model_of, request_of
from tests.llm.wire_formats import GREETING
from tests.tiers import slow

INTERNAL = re.compile(r"http|127\.0\.0\.1|openai|anthropic|MODEL_|_KEY|key|status|\d{3}", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A wish, what it results in, and whether the connection is used for the next request (None: it depends on what
    has arrived).
    """

    wish: str
    reason: Reason | None = None
    reused: bool | None = True
    retry_after: float | None = None
    detail: str | None = None


def status(code: int, reason: Reason, more: str = "", **fields: Any) -> Fault:
    return Fault(f"status={code}{more}", reason, **{"detail": f"Message of {code}. (key [key])", **fields})


# Their outcome comes after a time.
LATE_FAULTS = [
    status(503, Reason.PROVIDER_UNAVAILABLE, "&fault=stall_error", reused=False),
    Fault("fault=stall_headers", Reason.STALLED, reused=False),
    Fault("fault=drip", Reason.TIME_OUT, reused=False),
]
FAULTS = [
    # --- statuses
    status(307, Reason.NOT_A_STREAM),
    status(400, Reason.REQUEST_REFUSED),
    status(401, Reason.PROVIDER_UNAUTHORIZED),
    status(402, Reason.PROVIDER_QUOTA_EXCEEDED),
    status(403, Reason.PROVIDER_UNAUTHORIZED),
    status(404, Reason.MODEL_UNKNOWN),
    status(408, Reason.PROVIDER_UNAVAILABLE),
    status(409, Reason.PROVIDER_UNAVAILABLE),
    status(413, Reason.CONTEXT_TOO_LONG),
    status(422, Reason.REQUEST_REFUSED),
    status(425, Reason.PROVIDER_UNAVAILABLE),
    status(429, Reason.PROVIDER_RATE_LIMITED),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=7", retry_after=7.0),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=0.25", retry_after=0.25),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after_ms=1500&retry_after=2", retry_after=1.5),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_at=40", retry_after=40.0),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_at=-40", retry_after=0.0),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=soon"),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=-5"),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=1e9"),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=31536000", retry_after=31_536_000.0),
    status(429, Reason.PROVIDER_RATE_LIMITED, "&retry_after=31536000000000", retry_after=31_536_000_000_000.0),
    status(429, Reason.PROVIDER_QUOTA_EXCEEDED, "&code=insufficient_quota"),
    status(500, Reason.PROVIDER_UNAVAILABLE),
    status(502, Reason.PROVIDER_UNAVAILABLE),
    status(502, Reason.PROVIDER_UNAVAILABLE, "&shape=html", detail=""),
    status(500, Reason.PROVIDER_UNAVAILABLE, "&shape=stream"),
    status(503, Reason.PROVIDER_UNAVAILABLE, "&retry_after=3", retry_after=3.0),
    status(504, Reason.PROVIDER_UNAVAILABLE),
    status(529, Reason.PROVIDER_UNAVAILABLE),
    # --- connections
    Fault("fault=reset", Reason.CONNECTION_LOST, reused=False),
    Fault("fault=cut", Reason.CONNECTION_LOST, reused=False),
    Fault("fault=stall", Reason.STALLED, reused=False),
    Fault("fault=headers", Reason.MALFORMED_ANSWER, reused=False),
    # --- answers
    Fault("fault=malformed", Reason.MALFORMED_ANSWER, reused=None),
    Fault("fault=error", Reason.PROVIDER_UNAVAILABLE, reused=None),
    Fault("fault=no_end", Reason.CONNECTION_LOST),
    Fault("fault=empty", Reason.CONNECTION_LOST),
    Fault("fault=html", Reason.NOT_A_STREAM),
    Fault("fault=gzip", Reason.MALFORMED_ANSWER),
    Fault("fault=flood", Reason.ANSWER_TOO_LONG, reused=False),
    Fault("finish=content_filter", Reason.CONTENT_FILTERED),
    Fault("finish=content_filter&end_ms=20", Reason.CONTENT_FILTERED),
    # --- the body ends a while after the last event
    Fault("end_ms=20"),
    Fault("end_ms=60000", reused=False),
    # --- no faults
    Fault("ms=20"),
    Fault("fault=json"),
    Fault("fault=json_as_stream"),
    Fault("fault=stream_as_json"),
    Fault("usage=0"),
    Fault("usage=zero"),
    Fault("content=list"),
    Fault("refusal=1"),
    Fault("finish=length"),
    Fault("finish=max_tokens"),
    Fault("text="),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.llm.model_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture
def limits(settings, monkeypatch) -> Any:
    settings.MODEL_STALL_SECONDS, settings.MODEL_TIMEOUT_SECONDS = 0.4, 0.8
    monkeypatch.setattr("runs.llm.base.MODEL_OUTPUT_MAX_CHARS", 5000)
    return settings


async def ask(url: str, kind: str, wish: str) -> tuple[Heard | ModelError, Heard, list[dict[str, Any]]]:
    """The outcome of a request with the fault, that of one without it after it, and what the server saw of both."""
    outcome: Heard | ModelError
    try:
        model = model_of(at(url, kind), wish)
        try:
            outcome = await hear(client_for(model.server), request_of("Hi", model=model))
        except ModelError as error:
            outcome = error
        after = model_of(at(url, kind))
        healthy = await hear(client_for(after.server), request_of("Hi", model=after))
        async with aiohttp.ClientSession(trust_env=False) as session, session.get(f"{url}/requests") as response:
            seen = await response.json()
    finally:
        await close_sessions()
    return outcome, healthy, seen[-2:]


@pytest.mark.parametrize("fault", [*FAULTS, *slow(*LATE_FAULTS)], ids=lambda fault: fault.wish)
def test_each_fault_has_its_outcome(url: str, provider: str, fault: Fault, limits, caplog):
    caplog.set_level(logging.DEBUG)
    outcome, healthy, (first, second) = asyncio.run(ask(url, provider, fault.wish))

    assert healthy.text == GREETING, "the next request works"
    assert fault.reused in (None, first["connection"] == second["connection"])
    shown = caplog.text
    if isinstance(outcome, ModelError):
        shown += "".join(traceback.format_exception(outcome)) + repr(outcome.__dict__)
        assert outcome.reason is fault.reason
        assert outcome.message in {reason.message for reason in Reason}, "callers read one of the known sentences"
        assert not INTERNAL.search(outcome.message)
        if fault.detail is not None:
            assert outcome.detail == fault.detail
        if fault.retry_after is None:
            assert outcome.retry_after is None
        else:
            assert outcome.retry_after == pytest.approx(fault.retry_after, abs=5 if "retry_at" in fault.wish else 0)
    else:
        assert fault.reason is None
        assert outcome.text == ("" if fault.wish == "text=" else GREETING)
    assert "Very5ecret" not in shown


def test_which_reasons_are_tried_again():
    """What the interface says: connections, streams that break, 408, 409, 425, 429 and 5xx."""
    assert {reason for reason in Reason if reason.retried} == {
        Reason.PROVIDER_RATE_LIMITED,
        Reason.PROVIDER_UNAVAILABLE,
        Reason.PROVIDER_UNREACHABLE,
        Reason.CONNECTION_LOST,
        Reason.MALFORMED_ANSWER,
        Reason.STALLED,
    }


def test_a_refused_connection_is_unreachable(provider: str, caplog):
    caplog.set_level(logging.DEBUG)
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        model = model_of(at(f"http://127.0.0.1:{free.getsockname()[1]}", provider))

        async def main() -> None:
            try:
                await hear(client_for(model.server), request_of("Hi", model=model))
            finally:
                await close_sessions()

        with pytest.raises(ModelError) as caught:
            asyncio.run(main())
    assert caught.value.reason is Reason.PROVIDER_UNREACHABLE
    assert "127.0.0.1" not in caught.value.message + caught.value.detail + caplog.text
    assert KEY not in "".join(traceback.format_exception(caught.value))


# The words of known servers, with the status that each of them sends.
TOO_LONG = [
    (400, "This model's maximum context length is 128000 tokens. However, your messages resulted in 140000 tokens."),
    (400, "Your input exceeds the context window of this model. Please adjust your input and try again."),
    (400, "prompt is too long: 215000 tokens > 200000 maximum"),
    (400, "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length"),
    (400, "the request exceeds the available context size, try increasing it"),
    (500, "Context size has been exceeded."),
    (400, "prompt too long; exceeded max context length by 912 tokens"),
    (400, "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
    (400, "The number of tokens to keep from the initial prompt is greater than the context length."),
    (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    (400, "Prompt contains 33000 tokens and 0 draft tokens, too large for model with 32768 maximum context length"),
    (400, "This model's maximum prompt length is 131072 but the request contains 537812 tokens."),
    (400, "Invalid request: Your request exceeded model token limit: 8192"),
    (400, "Prompt exceeds max length"),
    (400, "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 98304]"),
    (400, "litellm.ContextWindowExceededError: litellm.BadRequestError"),
    (400, "Please reduce the length of the messages or completion."),
    (400, "Input is too long for requested model."),
    (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens"),
]
SHAPES = ["", "text", "object", "detail", "detail_list", "message_detail", "array", "metadata", "stream"]


@pytest.mark.parametrize(("code", "says"), TOO_LONG)
def test_a_request_that_is_too_long_is_known_by_the_words_of_all_servers(turn, code: int, says: str):
    with pytest.raises(ModelError) as caught:
        turn(f"status={code}&says={says.replace('+', '%2B')}")
    assert (caught.value.reason, caught.value.reason.code) == (Reason.CONTEXT_TOO_LONG, "CONTEXT_LENGTH_EXCEEDED")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("says", ["It is wrong", "This model's maximum context length is 10"])
def test_the_message_is_found_in_each_shape(turn, shape: str, says: str):
    with pytest.raises(ModelError) as caught:
        turn(f"status=400&shape={shape}&says={says}")
    assert caught.value.reason is (Reason.REQUEST_REFUSED if says == "It is wrong" else Reason.CONTEXT_TOO_LONG)
    assert says in caught.value.detail
    assert "Very5ecret" not in caught.value.detail


@pytest.mark.parametrize(
    ("code", "says", "reason"),
    [
        (400, "Output blocked by content filtering policy", Reason.CONTENT_FILTERED),
        (400, "It was filtered due to the prompt triggering content management policy.", Reason.CONTENT_FILTERED),
        (403, "Your input was flagged", Reason.CONTENT_FILTERED),
        (400, "Your credit balance is too low to access the API.", Reason.PROVIDER_QUOTA_EXCEEDED),
        (429, "You exceeded your quota, please check your plan and billing details.", Reason.PROVIDER_QUOTA_EXCEEDED),
        (400, "Invalid schema for function 'get_billing_address'", Reason.REQUEST_REFUSED),
        (503, "The billing service is away. Model not exist.", Reason.PROVIDER_UNAVAILABLE),
        (429, "Request too large: please reduce the length of the messages", Reason.PROVIDER_RATE_LIMITED),
        (400, "{'error': '/chat/completions: Invalid model name passed in model=gone.'}", Reason.MODEL_UNKNOWN),
        (400, "gone/gone is not a valid model ID", Reason.MODEL_UNKNOWN),
        (400, "Model Not Exist", Reason.MODEL_UNKNOWN),
        (400, "Invalid model: gone", Reason.MODEL_UNKNOWN),
        (400, "The provided model identifier is invalid.", Reason.MODEL_UNKNOWN),
        (403, "Project `p` has no access to `gone`&code=model_not_found", Reason.MODEL_UNKNOWN),
        (400, "Invalid value for the model's temperature", Reason.REQUEST_REFUSED),
    ],
)  # fmt: skip
def test_words_that_say_more_than_the_status(turn, code: int, says: str, reason: Reason):
    with pytest.raises(ModelError) as caught:
        turn(f"status={code}&says={says}")
    assert caught.value.reason is reason
