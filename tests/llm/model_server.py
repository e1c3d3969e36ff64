"""A model provider on loopback that speaks the real wire formats, and fails on demand.

``POST …/chat/completions`` and ``POST …/responses`` answer as OpenAI does, ``POST …/messages`` as Anthropic
(``wire_formats``). The model name of the request is a query string that selects the behaviour, so that catalogue rows,
benchmarks and tests need nothing else:

``text=…``        the answer (default: a greeting, or the tool results if there are any)
``chunks=N``      answer with N words, one per chunk          ``ms=N``      milliseconds before each chunk
``end_ms=N``      milliseconds before the end of the body
``call=TOOL``     call this tool first (repeatable)           ``args=JSON`` its arguments, one for each call
``reason=TEXT``   think first                                 ``refusal=1`` the text is a refusal
``content=list``  content as a list of parts                  ``phase=1``   the text has a phase (responses)
``split=N``       send the body N bytes at a time             ``finish=…``  another finish reason
``usage=…``       ``0``: report no token counts, ``zero``: report 0
``status=N``      answer with this HTTP status, and …
                  ``says=TEXT`` in the message, ``code=…`` as the error's code, ``shape=…`` as body (``_error_body``)
                  ``retry_after=…``, ``retry_after_ms=…``, ``retry_at=N`` (a date in N seconds) in the headers
``fault=…``       ``reset`` (connection lost before the answer), ``cut`` (lost half-way), ``stall`` (silent half-way;
                  ``at=N``: after N per cent),
                  ``stall_headers``, ``stall_error`` (silent within the body of an error), ``drip`` (one byte at a time,
                  without end), ``malformed`` (not JSON), ``no_end`` (the body ends, but the answer is incomplete),
                  ``error`` (an error event half-way), ``html`` (not a stream), ``flood`` (endless text), ``json`` (a
                  whole document), ``json_as_stream`` and ``stream_as_json`` (with the other's type), ``empty`` (no
                  body), ``headers`` (endless headers), ``gzip``

``python -m tests.llm.model_server --port N`` starts it as a process. It prints its address when it listens.
``GET /requests`` says which requests came on which connections, and which connections the client closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from tests.llm.wire_formats import FORMATS, Answer, Wish

STREAM = "text/event-stream"


@dataclass
class Recorded:
    """One received request, and how its connection ended."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    closed_by_client: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def closed(self) -> bool:
        return self.closed_by_client.is_set()


class ModelServer:
    """An in-process server: ``async with ModelServer() as server: … server.url``."""

    def __init__(self, *, record: bool = True) -> None:
        self.record = record
        self.requests: deque[Recorded] = deque(maxlen=1000)
        self.asked = asyncio.Event()
        """Set once there is a request."""
        self.connections = 0
        self.raw: Iterable[bytes] | None = None
        """Answer every request with exactly these pieces as the stream's body."""
        self.bare: Iterable[bytes] | None = None
        """Send exactly these pieces in place of an answer, its head included."""
        self.refuses_encrypted = False
        """Refuse to include encrypted reasoning, as OpenAI does for models that do not reason."""
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
                early = gone.result() if gone.done() and not gone.exception() else b""
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
        if request.path == "/requests":
            seen = [
                {"model": known.body.get("model"), "connection": known.connection, "closed": known.closed}
                for known in self.requests
                if known is not request
            ]
            _send_json(writer, 200, seen)
            return await _drained(writer)
        wish = Wish(str(request.body.get("model", "")))
        fault = wish.text("fault")
        format_of = next(FORMATS[path] for path in FORMATS if request.path.endswith(path))
        frames, end, error, document = format_of(Answer(request.body, wish))
        if fault == "stall_headers":
            await asyncio.Event().wait()
        if fault == "reset":
            _reset(writer)
            return False
        if fault == "headers":
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"X-Filler: " + b"x" * 1000 + b"\r\n")
                await writer.drain()
        if self.refuses_encrypted and request.body.get("include"):
            message = "Encrypted content is not supported with this model."
            error_of = {"message": message, "type": "invalid_request_error", "param": "include", "code": None}
            _send_json(writer, 400, {"error": error_of})
            return await _drained(writer)
        if status := wish.number("status"):
            body = _error_body(status, request, wish)
            if fault == "stall_error":
                writer.write(f"HTTP/1.1 {status} Status\r\nContent-Length: {len(body) + 1}\r\n\r\n".encode() + body)
                await asyncio.Event().wait()
            _send(writer, status, "application/json", body, _retry_headers(wish))
            return await _drained(writer)
        if fault == "html":
            _send(writer, 200, "text/html", b"<html><body>Welcome</body></html>")
            return await _drained(writer)
        if fault in ("json", "json_as_stream"):
            kind = STREAM if fault == "json_as_stream" else "application/json; charset=utf-8"
            _send(writer, 200, kind, json.dumps(document).encode())
            return await _drained(writer)
        if fault == "gzip":
            _send(writer, 200, STREAM, gzip.compress(b"".join(frames + end)), ("Content-Encoding: gzip",))
            return await _drained(writer)
        if fault == "empty":
            _send(writer, 200, STREAM, b"")
            return await _drained(writer)
        kind = "application/json" if fault == "stream_as_json" else STREAM
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nCache-Control: no-store\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        pieces = _pieces(self.raw) if self.raw is not None else _paced(_faulty(frames, end, error, wish), wish)
        async for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if fault == "cut":
            _reset(writer)
            return False
        if fault == "stall":
            await asyncio.Event().wait()
        await asyncio.sleep(wish.number("end_ms") / 1000)
        writer.write(b"0\r\n\r\n")
        return await _drained(writer)


@contextlib.contextmanager
def serving() -> Iterator[ModelServer]:
    """A server on an event loop of its own, for tests that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ModelServer()
    asyncio.run_coroutine_threadsafe(server.start(0), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def _drained(writer: asyncio.StreamWriter) -> bool:
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader, early: bytes) -> Recorded | None:
    try:
        head = (early + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Recorded(first.split(" ")[1].partition("?")[0], headers, json.loads(body or b"{}"), 0)


def _send(
    writer: asyncio.StreamWriter, status: int, content_type: str, body: bytes, headers: tuple[str, ...] = ()
) -> None:
    lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    if 300 <= status < 400:
        lines.append("Location: /elsewhere")
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


def _send_json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    _send(writer, status, "application/json", json.dumps(body).encode())


def _retry_headers(wish: Wish) -> tuple[str, ...]:
    headers = []
    if value := wish.text("retry_after"):
        headers.append(f"Retry-After: {value}")
    if value := wish.text("retry_after_ms"):
        headers.append(f"retry-after-ms: {value}")
    if seconds := wish.number("retry_at"):
        headers.append(f"Retry-After: {format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)}")
    return tuple(headers)


def _error_body(status: int, request: Recorded, wish: Wish) -> bytes:
    """An error in the provider's wording. Each quotes the key, as OpenAI's 401 does."""
    key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    text = f"{wish.text('says', f'Message of {status}.')} (key {key})"
    code = wish.text("code") or None
    error = {"message": text, "type": "api_error", "param": None, "code": code}
    default: Any = {"error": error}
    if request.path.endswith("/messages"):
        default = {"type": "error", "error": {"type": code or "api_error", "message": text}, "request_id": "req_1"}
    shapes: dict[str, Any] = {
        "text": {"error": text},
        "object": {"object": "error", "message": text, "type": "BadRequestError", "code": status},
        "detail": {"detail": text},
        "detail_list": {"detail": [{"loc": ["body", "messages", 0], "msg": text, "type": "value_error"}]},
        "message_detail": {"object": "error", "message": {"detail": [{"loc": ["body"], "msg": text}]}},
        "array": [{"error": {"code": status, "message": text, "status": "INVALID_ARGUMENT"}}],
        "metadata": {"error": {"message": "Provider returned error", "code": status, "metadata": {"raw": text}}},
    }
    shape = wish.text("shape")
    if shape == "html":
        return b"<html><h1>Bad gateway</h1></html>"
    if shape == "stream":
        return b": ping\n\nevent: error\ndata: " + json.dumps(default).encode() + b"\n\ndata: [DONE]\n\n"
    return json.dumps(shapes.get(shape, default)).encode()


def _faulty(frames: list[bytes], end: list[bytes], error: bytes, wish: Wish) -> list[bytes]:
    """Return the frames up to the requested fault."""
    half = frames[: max(1, len(frames) * wish.number("at", 50) // 100)]
    match wish.text("fault"):
        case "cut" | "stall":
            return half
        case "no_end" | "flood":
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
            for frame in frames:
                yield frame
    if fault == "drip":
        while True:
            yield b":"
            await asyncio.sleep(0.01)
    if size:
        body = b"".join(frames)
        frames = [body[at : at + size] for at in range(0, len(body), size)]
    # By a schedule, so that a busy machine does not make the answer longer.
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for number, frame in enumerate(frames, 1):
        if delay:
            await asyncio.sleep(begun + number * delay - loop.time())
        yield frame


async def _main(port: int) -> None:
    server = ModelServer()
    await server.start(port)
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model provider on loopback, for tests and benchmarks.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args().port))
