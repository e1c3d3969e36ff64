"""A model provider on loopback that speaks the real wire formats, and fails on demand.

``POST …/chat/completions`` answers as OpenAI does, ``POST …/messages`` as Anthropic. The model name of the
request is a query string that selects the behaviour, so that catalogue rows, benchmarks and tests need nothing else:

``text=…``        the answer (default: a greeting, or the tool results if there are any)
``chunks=N``      answer with N words, one per chunk          ``ms=N``      milliseconds before each chunk
``call=TOOL``     call this tool first (repeatable)           ``args=JSON`` its arguments, one for each call
``split=N``       send the body N bytes at a time             ``usage=0``   report no token counts
``status=N``      answer with this HTTP status                ``finish=…``  another finish reason
``fault=…``       ``cut`` (connection lost half-way), ``stall`` (silent half-way), ``stall_headers``, ``drip`` (one
                  byte at a time, without end), ``malformed`` (not JSON), ``no_end`` (the body ends, but the answer is
                  incomplete), ``error`` (an error event half-way), ``html`` (not a stream), ``flood`` (endless text)

``python -m tests.llm.model_server --port N`` starts it as a process. It prints its address when it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

GREETING = "Hello, wörld! 🦊 How can I help?"
INPUT_TOKENS, OUTPUT_TOKENS = 21, 13


@dataclass
class Recorded:
    """One received request, and how its connection ended."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    closed_by_client: asyncio.Event = field(default_factory=asyncio.Event)


class Wish:
    """The requested behaviour, parsed from the model's name."""

    def __init__(self, model: str) -> None:
        self.values = parse_qs(model, keep_blank_values=True)

    def text(self, name: str, default: str = "") -> str:
        return self.values.get(name, [default])[0]

    def number(self, name: str, default: int = 0) -> int:
        return int(self.text(name, str(default)))

    def calls(self) -> list[tuple[str, str]]:
        names, arguments = self.values.get("call", []), self.values.get("args", [])
        return [(name, arguments[at] if at < len(arguments) else "{}") for at, name in enumerate(names)]


class ModelServer:
    """An in-process server: ``async with ModelServer() as server: … server.url``."""

    def __init__(self, *, record: bool = True) -> None:
        self.record = record
        self.requests: list[Recorded] = []
        self.asked = asyncio.Event()
        """Set once there is a request."""
        self.connections = 0
        self.raw: Iterable[bytes] | None = None
        """Answer every request with exactly these pieces as the stream's body."""
        self.bare: Iterable[bytes] | None = None
        """Send exactly these pieces in place of an answer, its head included."""
        self._server: asyncio.Server
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ModelServer:
        await self.start(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096)

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        number = self.connections
        try:
            early = b""
            while request := await _read_request(reader, early):
                request.connection = number
                self.asked.set()
                if self.record:
                    self.requests.append(request)
                # During an answer a client normally only disconnects, but it may already send its next request.
                gone = asyncio.create_task(reader.read(1))
                answer = asyncio.create_task(self._answer(request, writer))
                await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
                early = gone.result() if gone.done() else b""
                if gone.done() and not early:
                    request.closed_by_client.set()
                    answer.cancel()
                    await asyncio.gather(answer, return_exceptions=True)
                    return
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                if not await answer:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer(self, request: Recorded, writer: asyncio.StreamWriter) -> bool:
        """Answer, and return whether the connection can be used again."""
        if self.bare is not None:
            for piece in self.bare:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return False
        anthropic = request.path.endswith("/messages")
        wish = Wish(str(request.body.get("model", "")))
        fault = wish.text("fault")
        if fault == "stall_headers":
            await asyncio.Event().wait()
        if status := wish.number("status"):
            _send_json(writer, status, _error_body(status, request.headers, anthropic=anthropic))
            await writer.drain()
            return True
        if fault == "html":
            _send(writer, 200, "text/html", b"<html><body>Welcome</body></html>")
            await writer.drain()
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if self.raw is not None:
            pieces = _pieces(self.raw)
        else:
            frames = _anthropic_frames(request, wish) if anthropic else _openai_frames(request, wish)
            pieces = _paced(frames, wish)
        async for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if fault == "cut":
            writer.transport.abort()
            return False
        if fault == "stall":
            await asyncio.Event().wait()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read_request(reader: asyncio.StreamReader, early: bytes) -> Recorded | None:
    try:
        head = (early + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Recorded(first.split(" ")[1].partition("?")[0], headers, json.loads(body or b"{}"), 0)


def _send(writer: asyncio.StreamWriter, status: int, content_type: str, body: bytes) -> None:
    location = "Location: /elsewhere\r\n" if 300 <= status < 400 else ""
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\n{location}Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _send_json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    _send(writer, status, "application/json", json.dumps(body).encode())


def _error_body(status: int, headers: dict[str, str], *, anthropic: bool) -> dict[str, Any]:
    """Return an error in the provider's wording. OpenAI's 401 quotes the key."""
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    message = {
        401: f"Incorrect API key provided: {key}. You can find your API key at https://platform.example/keys.",
        400: f"Invalid value for 'messages' (key {key}).",
        404: "The model `test` does not exist.",
        429: "Rate limit reached for requests.",
    }.get(status, "The server had an error.")
    if anthropic:
        return {"type": "error", "error": {"type": "api_error", "message": message}}
    return {"error": {"message": message, "type": "api_error", "param": None, "code": None}}


# --- answers --------------------------------------------------------------------------------------------------------


def _content(request: Recorded, wish: Wish) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the turn's text deltas and calls. There are no calls once the last question has tool results."""
    results = _results(request.body.get("messages", []))
    calls = [] if results else wish.calls()
    if count := wish.number("chunks"):
        return [f"word{number} " for number in range(1, count + 1)], calls
    text = wish.text("text", "" if calls else "; ".join(results) if results else GREETING)
    return [text[at : at + 3] for at in range(0, len(text), 3)], calls


def _results(messages: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for message in messages:
        parts = message["content"] if isinstance(message.get("content"), list) else []
        tool_results = [part for part in parts if part.get("type") == "tool_result"]
        if message["role"] == "tool":
            found.append(message["content"])
        elif tool_results:
            found += [str(part.get("content", "")) for part in tool_results]
        elif message["role"] == "user":
            found.clear()
    return found


def _halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def _frame(data: Any, event: str = "") -> bytes:
    head = f"event: {event}\n" if event else ""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{head}data: {text}\n\n".encode()


def _openai_frames(request: Recorded, wish: Wish) -> list[bytes]:
    deltas, calls = _content(request, wish)
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_750_000_000, "model": "test"}

    def choice(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return _frame({**base, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    frames = [choice({"role": "assistant", "content": "", "refusal": None})]
    frames += [choice({"content": text}) for text in deltas]
    turn = len(request.body.get("messages", []))
    for at, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        frames.append(
            choice({"tool_calls": [{"index": at, "id": f"call_{turn}_{at}", "type": "function", "function": function}]})
        )
        for part in _halves(arguments):
            frames.append(choice({"tool_calls": [{"index": at, "function": {"arguments": part}}]}))
    end = [choice({}, wish.text("finish", "tool_calls" if calls else "stop"))]
    if wish.text("usage") != "0" and request.body.get("stream_options", {}).get("include_usage"):
        counts = {"prompt_tokens": INPUT_TOKENS, "completion_tokens": OUTPUT_TOKENS, "total_tokens": 34}
        end.append(_frame({**base, "choices": [], "usage": counts}))
    end.append(_frame("[DONE]"))
    error = _frame({"error": {"message": "The server had an error.", "type": "server_error"}})
    return _faulty(frames, end, error, wish)


def _anthropic_frames(request: Recorded, wish: Wish) -> list[bytes]:
    deltas, calls = _content(request, wish)

    def event(name: str, **fields: Any) -> bytes:
        return _frame({"type": name, **fields}, name)

    counted = wish.text("usage") != "0"
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "test"}
    if counted:
        message["usage"] = {"input_tokens": INPUT_TOKENS - 5, "cache_read_input_tokens": 5, "output_tokens": 1}
    frames = [event("message_start", message=message), event("ping")]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if deltas:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": text} for text in deltas]))
    turn = len(request.body.get("messages", []))
    for at, (name, arguments) in enumerate(calls):
        parts = [{"type": "input_json_delta", "partial_json": part} for part in ["", *_halves(arguments)]]
        blocks.append(({"type": "tool_use", "id": f"toolu_{turn}_{at}", "name": name, "input": {}}, parts))
    for index, (block, parts) in enumerate(blocks):
        frames.append(event("content_block_start", index=index, content_block=block))
        frames += [event("content_block_delta", index=index, delta=part) for part in parts]
        frames.append(event("content_block_stop", index=index))
    reason = wish.text("finish", "tool_use" if calls else "end_turn")
    usage = {"usage": {"output_tokens": OUTPUT_TOKENS}} if counted else {}
    end = [
        event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, **usage),
        event("message_stop"),
    ]
    error = event("error", error={"type": "overloaded_error", "message": "Overloaded"})
    return _faulty(frames, end, error, wish)


def _faulty(frames: list[bytes], end: list[bytes], error: bytes, wish: Wish) -> list[bytes]:
    """Return the frames up to the requested fault."""
    half = frames[: max(1, len(frames) // 2)]
    match wish.text("fault"):
        case "cut" | "stall":
            return half
        case "no_end":
            return frames
        case "malformed":
            return [*half, b'data: {"choices": [oops\n\n', *end]
        case "error":
            return [*half, error]
    return frames + end


async def _pieces(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


async def _paced(frames: list[bytes], wish: Wish) -> AsyncIterator[bytes]:
    fault, delay, size = wish.text("fault"), wish.number("ms") / 1000, wish.number("split")
    if fault == "flood":
        while True:
            for frame in frames[1:-3]:
                yield frame
    if fault == "drip":
        while True:
            yield b":"
            await asyncio.sleep(0.01)
    if size:
        body = b"".join(frames)
        frames = [body[at : at + size] for at in range(0, len(body), size)]
    for frame in frames:
        if delay:
            await asyncio.sleep(delay)
        yield frame


async def _main(port: int) -> None:
    server = ModelServer(record=False)
    await server.start(port)
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model provider on loopback, for tests and benchmarks.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args().port))
