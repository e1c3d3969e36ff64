"""A provider that breaks the rules: each turn ends with an error, in bounded memory."""

import gzip
import itertools
import json
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from runs.catalogue.definitions import KINDS
from runs.errors import FailureReason
from runs.llm.base import ModelError
from runs.llm.registry import client_for
from tests.llm.helpers import OPENAI_END, Heard, at, data, hear, model_of, openai_delta, request_of
from tests.llm.model_server import ModelServer
from tests.tiers import slow

MIB = 1024 * 1024
MEMORY_MAX_BYTES = 32 * MIB
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.fixture
def lie(serve, turn, provider: str):
    """A turn whose answer is ``raw``, the stream's body, or ``bare``, the whole answer."""

    def run(*, raw: Iterable[bytes] | None = None, bare: Iterable[bytes] | None = None) -> Heard:
        async def main(server: ModelServer) -> Heard:
            server.raw, server.bare, server.record = raw, bare, False
            model = model_of(at(server.url, provider))
            return await hear(client_for(model.server), request_of("Hi", model=model))

        turn("text=x")  # imports the adapter, whose memory does not count
        tracemalloc.start()
        try:
            return serve(main)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MEMORY_MAX_BYTES

    return run


def delta(provider: str, text: str) -> bytes:
    """An event with a piece of text."""
    if provider == "openai":
        return data(openai_delta(content=text))[0]
    if provider == "openai_responses":
        return data({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": text})[0]
    return data({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})[0]


def call(provider: str, index: int, arguments: str = "") -> bytes:
    """An event that begins a call."""
    if provider == "openai":
        function = {"name": "t", "arguments": arguments}
        return data(openai_delta(tool_calls=[{"index": index, "id": f"c{index}", "function": function}]))[0]
    if provider == "openai_responses":
        item = {"type": "function_call", "id": f"fc{index}", "call_id": f"c{index}", "name": "t"}
        item["arguments"] = arguments
        return data({"type": "response.output_item.added", "output_index": index, "item": item})[0]
    block = {"type": "tool_use", "id": f"c{index}", "name": "t", "input": {}}
    return data({"type": "content_block_start", "index": index, "content_block": block})[0]


def more_arguments(provider: str, text: str) -> bytes:
    if provider == "openai":
        return data(openai_delta(tool_calls=[{"index": 0, "function": {"arguments": text}}]))[0]
    if provider == "openai_responses":
        return data({"type": "response.function_call_arguments.delta", "output_index": 0, "delta": text})[0]
    part = {"type": "input_json_delta", "partial_json": text}
    return data({"type": "content_block_delta", "index": 0, "delta": part})[0]


def usage(provider: str, **counts: Any) -> list[bytes]:
    """A complete answer with these token counts."""
    if provider == "openai":
        return data({"choices": [], "usage": counts}, *OPENAI_END)
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    counts = {names.get(name, name): value for name, value in counts.items()}
    if provider == "openai_responses":
        response = {"status": "completed", "output": [], "usage": counts}
        return data({"type": "response.completed", "response": response})
    ended = [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": counts}, {"type": "message_stop"}]
    return data({"type": "message_start", "message": {"usage": counts}}, *ended)


def kinds(first: Any, *others: Any) -> list[Any]:
    """The first with each kind of provider; the others, which all kinds read with the same code, with one."""
    names = [name for name, kind in KINDS.items() if not kind.is_offline]
    return [*((name, first) for name in names), *slow(*((names[0], other) for other in others))]


@pytest.mark.parametrize(
    ("provider", "piece"),
    kinds(b"x" * 65536, b"data:\n" * 10_000, b"data: x\n" * 5000, b"data: " + b"[" * 60_000),
    indirect=["provider"],
)
def test_an_event_without_end_is_an_error(lie, piece: bytes) -> None:
    with pytest.raises(ModelError):
        lie(raw=itertools.repeat(piece))


@pytest.mark.parametrize(
    "piece", [b": comment\n\n" * 1000, *slow(b"\n" * 10_000, b"event: ping\n\n" * 1000, b"data:{}\n\n")]
)
def test_events_that_say_nothing_end_with_the_time_of_the_turn(lie, settings, piece: bytes) -> None:
    settings.MODEL_TIMEOUT_SECONDS = 0.5
    with pytest.raises(ModelError):
        lie(raw=itertools.repeat(piece))


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "forever"),
    [
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (HEAD + b"\r\n", b"\n"),
        *slow((HEAD + b"\r\n", b": comment\n\n"), (HEAD + b"\r\n", b"event: ping\n\n")),
        (HEAD + b"\r\n", b"data:{}\n\n"),
        (CHUNKED, b"1\r\n:\r\n"),
    ],
    ids=["interim", "lines", "comments", "no-data", "no-values", "chunks"],
)
def test_an_answer_that_says_nothing_is_soon_an_error(lie, head: bytes, forever: bytes, monkeypatch) -> None:
    """It does not take the time of a turn, in which it would hold up the other runs of the event loop."""
    monkeypatch.setattr("runs.llm.http.EVENTS_MAX", 20_000)
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        yield head
        while True:
            yield forever * 1000
            sent += 1000 * len(forever)

    with pytest.raises(ModelError) as caught:
        lie(bare=pieces())
    assert caught.value.reason in (FailureReason.CONNECTION_LOST, FailureReason.MALFORMED_ANSWER)
    assert sent < 8 * MIB, "with what the buffers of the connection hold"


def test_a_content_type_without_end_costs_no_time(lie, provider: str) -> None:
    head = HEAD.replace(b"stream\r\n", b"stream" + b";" * 16_000 + b"\r\n") + b"\r\n"
    begun = time.process_time()
    with pytest.raises(ModelError, match="broke off"):
        lie(bare=[head, delta(provider, "x")])
    assert time.process_time() - begun < 5


def test_many_deltas_of_one_character_are_limited(lie, provider: str, monkeypatch) -> None:
    monkeypatch.setattr("runs.llm.base.MODEL_OUTPUT_MAX_CHARS", 5000)
    with pytest.raises(ModelError):
        lie(raw=itertools.repeat(delta(provider, "x") * 100))


@pytest.mark.parametrize("part", ["x" * 100_000, *slow("[" * 100_000, "")])
def test_arguments_without_end_are_limited(lie, provider: str, settings, part: str) -> None:
    settings.MODEL_TIMEOUT_SECONDS = 2
    with pytest.raises(ModelError):
        lie(raw=itertools.chain([call(provider, 0)], itertools.repeat(more_arguments(provider, part))))


def test_ten_thousand_calls_in_a_turn_are_an_error(lie, provider: str) -> None:
    with pytest.raises(ModelError):
        lie(raw=[b"".join(call(provider, index) for index in range(10_000))])


@pytest.mark.parametrize(
    "count",
    [
        *("-1", "-9e99", "1e400", f"1e{10**20}", "NaN", "Infinity", "0.5", '"12"', "true", "null", "[1]", "{}"),
        *(str(2**70), "9" * 5000),
    ],
)
def test_impossible_token_counts_are_an_error_or_not_used(lie, provider: str, count: str) -> None:
    marked = dict.fromkeys(("prompt_tokens", "completion_tokens", "cache_read_input_tokens"), "COUNT")
    frames = [frame.replace(b'"COUNT"', count.encode()) for frame in usage(provider, **marked)]
    try:
        heard = lie(raw=frames)
    except ModelError:
        return
    assert 0 <= heard.usage.input_tokens < 100
    assert 0 <= heard.usage.output_tokens < 100


def test_a_deep_or_wide_event_is_an_error(lie) -> None:
    for wide in (b"[" * 100_000, b'{"a":' * 100_000, b"[" + b"[]," * 600_000 + b"[]]"):
        with pytest.raises(ModelError):
            lie(raw=[b"data: " + wide + b"\n\n"])


@pytest.mark.parametrize(
    ("head", "forever"),
    [
        (HEAD, b"X-Header: value\r\n" * 100),
        (HEAD, b"X" * 65536),
        (HEAD + b"X-Header: ", b"v" * 65536),
        (b"HTTP/1.1 ", b"2" * 65536),
        *slow(
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * 65536),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 65536),
        ),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: value\r\n" * 100),
    ],
    ids=["headers", "name", "value", "status", "continue", "chunk-size", "chunk-extension", "trailers"],
)
def test_a_head_without_end_is_an_error(lie, settings, head: bytes, forever: bytes) -> None:
    settings.MODEL_STALL_SECONDS = 2
    with pytest.raises(ModelError):
        lie(bare=itertools.chain([head], itertools.repeat(forever)))


@pytest.mark.parametrize(("provider", "status"), kinds(200, 400), indirect=["provider"])
def test_a_compressed_answer_is_refused(lie, status: int) -> None:
    bomb = gzip.compress(b"data: " + bytes(64 * MIB))
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
    with pytest.raises(ModelError):
        lie(bare=[f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode(), bomb])


def test_an_error_of_any_length_is_short(lie) -> None:
    error = json.dumps({"error": {"message": "no " * 300_000}}).encode()
    with pytest.raises(ModelError) as caught:
        lie(raw=[b"data: " + error + b"\n\n"])
    assert len(str(caught.value)) < 2000
