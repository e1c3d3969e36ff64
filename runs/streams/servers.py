"""The two servers of streams: an ASGI application for processes of their own, and a web process's threaded server that
hands its connection over. Both render the events that the hub yields, and send them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
import ssl
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

from corsheaders.middleware import CorsMiddleware
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.base import BaseHandler
from django.db import close_old_connections
from django.http import HttpResponse, HttpResponseBase

from config.api.errors import error_response, response_to
from config.kernel.errors import DomainError, RateLimited, Unavailable
from config.outbound.loop import raise_open_file_limit, shared
from runs.streams.frames import render
from runs.streams.hub import Hub, Opening, Stream, places
from runs.streams.views import StreamResponse

T = TypeVar("T")
STREAM_PATH = re.compile(r"/api/(?:public/)?v1/runs/[^/]+/stream")


class Application:
    """The ASGI application of the stream processes: streams, and ``django`` for every other path.

    Django opens a stream on a thread, through all middleware and the view, as it answers any request. The open stream
    is a coroutine without a thread or a database connection.
    """

    def __init__(self, django: Any) -> None:
        self.django = django
        self.handler = BaseHandler()
        self.handler.load_middleware()
        self.threads = ThreadPoolExecutor(settings.STREAM_OPEN_THREADS, "stream-open")
        self.hub: Hub | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "http" and {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys():
            # Servers in front may take another one of the two for the body's length (RFC 9112, section 6.1).
            await answer_with(error_response(400), send)
        elif scope["type"] == "http" and STREAM_PATH.fullmatch(scope["path"]):
            await self.answer(scope, receive, send)
        elif scope["type"] == "http":
            await self.pass_on(scope, receive, send)
        else:
            await self.django(scope, receive, send)

    async def pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        """To Django, with a limited body: Django's ASGI handler reads a whole body before any check of its length."""
        uploads = scope["path"].startswith("/uploads/")
        limit = settings.ATTACHMENT_MAX_BYTES if uploads else settings.API_MAX_BODY_BYTES
        taken = 0

        async def bounded() -> Any:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken <= limit:
                return message
            await answer_with(refusal_to(scope, 413), send)
            return {"type": "http.disconnect"}

        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            await answer_with(refusal_to(scope, 413), send)
        else:
            await self.django(scope, bounded, send)

    async def live(self, receive: Any, send: Any) -> None:
        raise_open_file_limit()
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        if self.hub is not None:
            await self.hub.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        response = await asyncio.get_running_loop().run_in_executor(self.threads, self.ask_django, scope)
        self.hub = self.hub or Hub()
        if not isinstance(response, StreamResponse):
            await answer_with(response, send, body=scope["method"] != "HEAD")
            return
        stream = self.hub.join(response.opening)
        leaving = asyncio.create_task(close_when_client_leaves(receive, stream))
        try:
            await begin(response, send)
            del response  # a stream may stay open for hours
            await pump(stream, send)
        finally:
            leaving.cancel()
            stream.leave()

    def ask_django(self, scope: Any) -> HttpResponseBase:
        close_old_connections()
        try:
            # A request for a stream needs no body, so a body is not read.
            request = ASGIRequest(scope, io.BytesIO())
        except UnicodeDecodeError:
            return error_response(400)
        response = self.handler.get_response(request)
        response.close()  # the hub makes the body of a stream
        close_old_connections()
        return admitted(response, self.hub) if isinstance(response, StreamResponse) else response


def refusal_to(scope: Any, status: int) -> HttpResponseBase:
    """An error that no view answers, with the headers that let web apps of allowed origins read it."""
    with_headers = CorsMiddleware(lambda request: error_response(status))
    return cast(HttpResponseBase, with_headers(ASGIRequest(scope | {"query_string": b""}, io.BytesIO())))


async def begin(response: HttpResponseBase, send: Any) -> None:
    headers = [(name.lower().encode("latin1"), value.encode("latin1")) for name, value in response.items()]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})


async def answer_with(response: HttpResponseBase, send: Any, *, body: bool = True) -> None:
    await begin(response, send)
    content = response.content if body and isinstance(response, HttpResponse) else b""
    await send({"type": "http.response.body", "body": content})


async def pump(stream: Stream, send: Any) -> None:
    """Send until the stream ends. A client that receives nothing for STREAM_STALL_SECONDS is disconnected; it can
    reconnect at its position.
    """
    body: bytes | None = b""
    while body is not None:
        try:
            events = await stream.next()
            body = None if events is None else render(events)
        except asyncio.CancelledError:
            body = None  # the server shuts down: the response ends in order, and the client reconnects
        try:
            async with asyncio.timeout(settings.STREAM_STALL_SECONDS):
                await send({"type": "http.response.body", "body": body or b"", "more_body": body is not None})
        except TimeoutError:
            # ASGI has no message that aborts, and an orderly end would wait for the client. uvicorn's ``send`` is a
            # method of the object that holds the connection.
            transport = getattr(getattr(send, "__self__", None), "transport", None)
            if transport is not None:
                transport.abort()
            return


async def close_when_client_leaves(receive: Any, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.close()


def admitted(response: StreamResponse, hub: Hub | None) -> HttpResponseBase:
    """The response with a place of its user, or the refusal of a stream above STREAM_CONNECTIONS_MAX (503) or
    STREAMS_PER_USER (429). Call it on a thread.
    """
    if hub is not None and hub.count >= settings.STREAM_CONNECTIONS_MAX:
        return refusal_of(response, Unavailable())
    try:
        place = places.take(response.opening.user_id, settings.STREAMS_PER_USER)
    except RateLimited as error:
        return refusal_of(response, error)
    response.opening = replace(response.opening, place=place)
    return response


def refusal_of(response: StreamResponse, error: DomainError) -> HttpResponse:
    refusal = response_to(error)
    for name, value in response.items():
        # The request's id, the rate limit's state, and what lets web apps of other origins read the answer.
        if name.lower().startswith(("x-r", "access-control-", "vary")):
            refusal[name] = value
    return refusal


class HandedOver(Exception):
    """Control flow: a stream took the connection over. The server closes its own socket and sends nothing."""


class Background:
    """The hub of a process that answers on threads: its streams are coroutines on the process's event loop."""

    def __init__(self) -> None:
        self.hub: Hub | None = None

    def adopt(self, connection: socket.socket, head: bytes, opening: Opening) -> None:
        """Send ``head`` and then the stream on a duplicate of ``connection``."""
        try:
            duplicate = connection.dup()
        except OSError:
            places.free(opening.place)
            raise
        shared.submit(self._serve(duplicate, head, opening))

    def join(self, opening: Opening) -> Stream:
        """On the event loop only."""
        self.hub = self.hub or Hub()
        return self.hub.join(opening)

    async def _serve(self, connection: socket.socket, head: bytes, opening: Opening) -> None:
        stream = self.join(opening)
        try:
            connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=connection)
        except BaseException:
            stream.leave()
            raise
        leaving = asyncio.create_task(self._close_at_end(reader, stream))
        try:
            writer.write(head)
            while (events := await stream.next()) is not None:
                writer.write(render(events))
                async with asyncio.timeout(settings.STREAM_STALL_SECONDS):
                    await writer.drain()
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            leaving.cancel()
            stream.leave()
            writer.close()

    async def _close_at_end(self, reader: asyncio.StreamReader, stream: Stream) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
        stream.close()


background = Background()


def hand_over_streams(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """``application`` for a server that gives its socket as ``gunicorn.socket`` and accepts ``HandedOver``."""
    raise_open_file_limit()

    def with_streams(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        given: list[Any] = []
        response = application(environ, lambda *start: given.extend(start))
        connection = environ.get("gunicorn.socket")
        if not isinstance(response, StreamResponse) or connection is None or isinstance(connection, ssl.SSLSocket):
            start_response(*given)
            return response
        answer = admitted(response, background.hub)
        if not isinstance(answer, StreamResponse):
            start_response(f"{answer.status_code} {answer.reason_phrase}", list(answer.items()))
            return answer
        lines = ["HTTP/1.1 200 OK", "Connection: close", *(f"{name}: {value}" for name, value in response.items())]
        head = "\r\n".join([*lines, "", ""]).encode("latin1")
        response.close()
        background.adopt(connection, head, answer.opening)
        raise HandedOver

    return with_streams
