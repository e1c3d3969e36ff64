"""HTTP/1.1 on one connection: requests are read on the event loop, answered one after another, and sent by it.

A thread works on a request only after the whole request has arrived, and only until its answer is made. A client that
sends or reads slowly occupies memory, which is limited, and no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from typing import NoReturn, cast

import httptools

from config import settings
from config.api.live import Body
from config.serve.answers import BODILESS, Answer, Rest, answer
from config.serve.requests import (
    CHUNKED_WIRE_FACTOR,
    HEAD_MAX_BYTES,
    HEADER_MAX_BYTES,
    HEADERS_MAX,
    REQUEST_LINE_MAX_BYTES,
    Refused,
    Request,
    envelope,
    environment,
)
from config.serve.state import State

logger = logging.getLogger(__name__)

# How long a closed connection waits for the client's end. A client that still sends could not read the answer if the
# connection were reset.
CLOSE_SECONDS = 2.0
# The system's own buffer of megabytes would hide for minutes that a slow client reads.
SEND_BUFFER_BYTES = 128 * 1024


class StopParsing(Exception):
    """Ends the parser's work from one of its callbacks."""


class Gone(Exception):
    """The connection is closed."""


class Connection(asyncio.Protocol):
    """``deadline`` is when the connection is closed, unless a request is being answered meanwhile."""

    transport: asyncio.Transport

    def __init__(self, state: State) -> None:
        self.state = state
        self.parser = httptools.HttpRequestParser(self)
        self.deadline = time.monotonic() + settings.WEB_READ_SECONDS
        # The request that arrives.
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_bytes = 0
        self.request: Request | None = None
        self.begun = 0.0
        self.refusal = 0
        # Requests that have arrived, and refusals of invalid ones.
        self.complete: deque[Request | int] = deque()
        self.idle = False  # after an answer, and before the next request
        self.last = False  # nothing more is read as HTTP
        self.ended = False  # the client has ended its side
        self.task: asyncio.Task[None] | None = None
        self.live: Body | None = None
        self.sendable = asyncio.Event()
        self.sendable.set()

    # --- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # The answer is sent when the system has all of it. A transport without a buffer shows that.
        self.transport.set_write_buffer_limits(0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.base = environment(transport.get_extra_info("sockname"), transport.get_extra_info("peername"))
        self.state.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.state.connections.discard(self)
        self.sendable.set()
        if self.live is not None:
            self.live.close()
        if self.request is not None:
            self.drop(self.request)
        while self.complete:
            request = self.complete.popleft()
            if isinstance(request, Request):
                self.drop(request)

    def eof_received(self) -> bool:
        """A client that has ended its side still gets the answers to its complete requests."""
        self.last = self.ended = True
        if self.live is not None:
            self.live.close()
        return self.task is not None

    def pause_writing(self) -> None:
        self.sendable.clear()

    def resume_writing(self) -> None:
        self.sendable.set()

    def expire(self, now: float) -> None:
        if now >= self.deadline and self.task is None:
            self.transport.abort()

    def stop(self) -> None:
        """The process stops: answer what has arrived, and end a live body, so that its client connects again."""
        if self.live is not None:
            self.live.close()
        elif self.task is None and self.request is None:
            self.transport.close()

    # --- reading -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.last or self.transport.is_closing():
            return
        answering = self.task is not None
        if self.request is None:
            if self.idle:
                self.idle = False
                self.deadline = time.monotonic() + settings.WEB_READ_SECONDS
            self.head_bytes += len(data)
        else:
            self.request.wire += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.last = True  # we stay with HTTP/1.1
        except httptools.HttpParserError:
            self.refuse(self.refusal or 400)
        else:
            if self.request is None and self.head_bytes > HEAD_MAX_BYTES:
                self.refuse(431 if self.headers else 414)
            elif self.request is not None and self.request.wire > CHUNKED_WIRE_FACTOR * self.request.limit:
                self.refuse(400)
        if self.complete:
            self.begin_to_answer()
            if answering:
                self.transport.pause_reading()

    def on_message_begin(self) -> None:
        self.url, self.headers = b"", []

    def on_url(self, part: bytes) -> None:
        self.url += part
        if len(self.url) > REQUEST_LINE_MAX_BYTES:
            self.stop_parsing(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.request is None:  # otherwise a trailer
            self.headers.append((name, value))
            if len(self.headers) > HEADERS_MAX or len(name) + len(value) > HEADER_MAX_BYTES:
                self.stop_parsing(431)

    def on_headers_complete(self) -> None:
        try:
            request = Request(
                self.base, self.parser.get_method(), self.parser.get_http_version(), self.url, self.headers
            )
        except Refused as refused:
            self.stop_parsing(refused.status)
        request.keep_alive = self.parser.should_keep_alive()
        self.request = request
        self.begun = time.monotonic()
        self.deadline = self.begun + settings.WEB_READ_SECONDS
        if request.unread:
            self.finish(request, last=True)
            raise StopParsing
        if request.body is not None:
            self.state.bodies.begin(request, self.give_up)
            if request.expects_continue and not self.complete and self.task is None:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        request = self.request
        if request is None or request.body is None:
            return
        try:
            within = request.take(part)
        except OSError:
            logger.exception("a body cannot be kept in the directory for temporary files")
            self.stop_parsing(503)
        self.state.bodies.keep(request, len(part))
        allowed = settings.WEB_READ_SECONDS + request.size / settings.WEB_READ_BYTES_PER_SECOND
        self.deadline = self.begun + min(allowed, settings.WEB_BODY_SECONDS)
        if not within and self.request is not None:  # it may have been given up
            self.finish(request, last=True)
            raise StopParsing

    def on_message_complete(self) -> None:
        if self.request is not None:
            self.finish(self.request, last=not self.request.keep_alive)

    def finish(self, request: Request, *, last: bool) -> None:
        """The request is complete as far as it is read."""
        self.request = None
        self.state.bodies.arrived(request)
        request.keep_alive = request.keep_alive and not last
        request.finish()
        self.complete.append(request)
        self.head_bytes = 0
        self.last = self.last or last
        self.deadline = time.monotonic() + settings.WEB_READ_SECONDS

    def stop_parsing(self, status: int) -> NoReturn:
        self.refusal = status
        raise StopParsing

    def refuse(self, status: int) -> None:
        """Answer with the error envelope and read nothing more."""
        if self.last:
            return
        self.last = True
        if self.request is not None:
            self.drop(self.request)
            self.request = None
        self.complete.append(status)

    def give_up(self) -> None:
        """Other bodies need the room of this one."""
        self.refuse(503)
        self.begin_to_answer()

    def drop(self, request: Request) -> None:
        self.state.bodies.free(request)
        request.close()

    # --- answering ---------------------------------------------------------------------------------------------------

    def begin_to_answer(self) -> None:
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self.answer_all())

    async def answer_all(self) -> None:
        try:
            while self.complete:
                request = self.complete.popleft()
                if isinstance(request, Request):
                    await self.answer(request)
                else:
                    refusal = Answer(*envelope(request))
                    await self.send(refusal.head("1.1", keep_alive=False)[0] + refusal.content)
            if self.last or self.state.stopping:
                self.close()
            else:
                self.idle = not self.head_bytes and self.request is None
                left = self.state.keepalive if self.idle else settings.WEB_READ_SECONDS
                self.deadline = time.monotonic() + left
                self.transport.resume_reading()
        except Gone:
            pass
        except Exception:
            logger.exception("an answer was not sent")
            self.transport.abort()
        finally:
            self.task = None

    async def answer(self, request: Request) -> None:
        loop, begun = asyncio.get_running_loop(), time.perf_counter()
        made = await loop.run_in_executor(self.state.threads, answer, self.state.application, request)
        self.state.bodies.free(request)
        keep_alive = request.keep_alive and not self.state.stopping and self.state.keepalive > 0
        head, chunked, keep_alive = made.head(request.version, keep_alive=keep_alive)
        self.last = self.last or not keep_alive
        sent = len(made.content)
        if request.environ["REQUEST_METHOD"] == "HEAD" or made.status.startswith(BODILESS):
            made.content, sent = b"", 0
            if made.rest is not None:
                await loop.run_in_executor(self.state.threads, made.rest.close)
            await self.send(head)
        elif made.live is not None:
            sent = await self.send_live(head, made.live(), chunked=chunked)
        elif made.rest is not None:
            sent = await self.send_rest(head, made, made.rest, chunked=chunked)
        else:
            await self.send(head + made.content)
        if self.state.log_access is not None:
            self.state.log_access(request.environ, made.status, sent, time.perf_counter() - begun)

    async def send_live(self, head: bytes, body: Body, *, chunked: bool) -> int:
        sent = 0
        self.live = body
        try:
            if self.ended:
                body.close()
            await self.send(head)
            while (part := await body.next()) is not None:
                await self.send(framed(part, chunked=chunked))
                sent += len(part)
            await self.send(framed(b"", chunked=chunked))
        finally:
            self.live = None
            body.leave()
        return sent

    async def send_rest(self, head: bytes, made: Answer, rest: Rest, *, chunked: bool) -> int:
        loop, sent = asyncio.get_running_loop(), 0
        part: bytes | None = made.content
        try:
            await self.send(head)
            while part is not None:
                if part:
                    await self.send(framed(part, chunked=chunked))
                sent += len(part)
                part = await loop.run_in_executor(self.state.threads, rest.next)
            await self.send(framed(b"", chunked=chunked))
        finally:
            await loop.run_in_executor(self.state.threads, rest.close)
        if made.length not in (None, sent):
            raise RuntimeError(f"the body has {sent} bytes, and Content-Length is {made.length}")
        return sent

    async def send(self, data: bytes) -> None:
        """Returns when the system has taken all of it. A client that reads nothing for STREAM_STALL_SECONDS is
        disconnected.
        """
        if self.transport.is_closing():
            raise Gone
        self.transport.write(data)
        while not self.sendable.is_set():
            left = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(settings.STREAM_STALL_SECONDS):
                    await self.sendable.wait()
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= left:
                    self.transport.abort()
                    raise Gone from None
        if self.transport.is_closing():
            raise Gone

    def close(self) -> None:
        """End our side, and wait for the client's end for CLOSE_SECONDS."""
        if self.ended:
            self.transport.close()
            return
        self.last = True
        self.deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(OSError):
            self.transport.write_eof()
        self.transport.resume_reading()


def framed(part: bytes, *, chunked: bool) -> bytes:
    """An empty part is the end."""
    return b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
