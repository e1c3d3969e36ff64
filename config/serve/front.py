"""The ASGI application: it reads bodies and sends answers on the event loop. Once a request has arrived as a whole,
Django makes the answer, through WSGI on a bounded number of threads. So a client that sends or reads slowly occupies
memory, which is limited, and no thread.
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from django.http import FileResponse

from config import settings
from config.api.live import KEY, Body, Broken
from config.limits.share import Room
from config.queue import publisher
from config.serve import requests
from config.serve.requests import Receive, Refused

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]

# How long the rest of an unused body is read: if the connection is reset, a client that still sends loses the answer.
DRAIN_SECONDS = 2.0
# Larger answers are sent in parts of this size, as the client reads them.
PART_BYTES = 64 * 1024
# The most bytes of all answers larger than PART_BYTES that are not sent yet.
UNSENT_MAX_BYTES = 128 * 1024 * 1024
PARENT_SECONDS = 1.0
# Files are read in parts that are large enough for a change of threads.
FileResponse.block_size = PART_BYTES


class Gone(Exception):
    """The client has left, or it reads nothing."""


class Parts:
    """A body whose parts Django makes, on threads, as the client reads them."""

    def __init__(self, threads: ThreadPoolExecutor, response: Any) -> None:
        self.threads, self.response, self.parts = threads, response, iter(response)
        self.left = False
        # Runs functions in the context of the thread that made the answer, which has the request's id.
        self.run: Callable[..., Any] = contextvars.copy_context().run

    async def next(self) -> bytes | None:
        run = asyncio.get_running_loop().run_in_executor
        return None if self.left else await run(self.threads, self.run, next, self.parts, None)

    def close(self) -> None:
        self.left = True

    def leave(self) -> None:
        self.threads.submit(self.run, close, self.response)


@dataclass
class Answer:
    """``content``, and after it a body in parts, or one that ``live`` opens."""

    status: int
    headers: list[tuple[str, str]]
    content: bytes = b""
    parts: Parts | None = None
    live: Callable[[], Body] | None = None


class Front:
    """Used on the event loop only. ``django`` is the WSGI application."""

    def __init__(self, django: Any) -> None:
        self.django = django
        self.threads = ThreadPoolExecutor(settings.WEB_THREADS, "web")
        self.bodies = Room(requests.BODIES_MAX_BYTES)
        self.unsent = Room(UNSENT_MAX_BYTES)
        self.live: set[Body] = set()
        self.stopping = False

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        try:
            await self.serve(scope, receive, send)
        except Refused as refused:
            answer = refusal(*refused.args)
            await start(send, answer)
            await send_end(send, answer.content)
            await drain(receive)
        except (Gone, Broken):
            pass  # without the end of the answer, the server breaks the connection

    # --- start and stop ----------------------------------------------------------------------------------------------

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        # The server already has handlers for both signals, and waits until all connections are closed.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        task = asyncio.create_task(self.watch_parent())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        task.cancel()
        await asyncio.to_thread(publisher.flush)
        await send({"type": "lifespan.shutdown.complete"})

    def stop(self) -> None:
        """End the streams, so that their clients connect again, and let the server stop."""
        if not self.stopping:
            self.stopping = True
            for body in list(self.live):
                body.close()
            os.kill(os.getpid(), signal.SIGINT)

    async def watch_parent(self) -> None:
        """Stop when the process that started this one was killed: a new one needs the port."""
        parent = os.getppid()
        while os.getppid() == parent:  # noqa: ASYNC110
            await asyncio.sleep(PARENT_SECONDS)
        self.stop()

    # --- a request ---------------------------------------------------------------------------------------------------

    async def serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        environ = requests.environment(scope)
        chunked = "HTTP_TRANSFER_ENCODING" in environ
        async with requests.arrived(environ, receive, self.bodies) as rest:
            answer = await asyncio.get_running_loop().run_in_executor(self.threads, self.call, environ)
        if chunked:
            # This server ignores a Content-Length beside it, so a proxy in front may see another end of the body:
            # nothing that follows on the connection is taken for a request (RFC 9112, section 6.3).
            answer.headers.append(("Connection", "close"))
        if answer.parts or answer.live:
            await self.send_body(answer, receive, send)
        elif len(answer.content) > PART_BYTES:
            await self.send_large(answer, environ, send)
        else:
            await start(send, answer)
            await send_end(send, answer.content)
        if rest and "HTTP_EXPECT" not in environ:
            await drain(receive)

    def call(self, environ: dict[str, Any]) -> Answer:
        """Django's answer. Runs on a thread."""
        started: list[Any] = []
        try:
            response = self.django(environ, lambda *given: started.extend(given))
            status, headers = int(started[0][:3]), started[1]
            if KEY in environ and status == 200:
                close(response)
                return Answer(status, headers, live=environ[KEY])
            # A response that a library has wrapped, and that is not known to be whole, may never end.
            if getattr(response, "streaming", not isinstance(response, (list, tuple))):
                if environ["REQUEST_METHOD"] == "HEAD":  # the server leaves out the other bodies
                    close(response)
                    return Answer(status, headers)
                body = Parts(self.threads, response)
                return Answer(status, headers, next(body.parts, b""), body)
            content = b"".join(response)
            close(response)
            return Answer(status, headers, content)
        except Exception:
            logger.exception("a request failed outside of Django")
            return refusal(500, "INTERNAL_ERROR", "Something went wrong on our side.")

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send_large(self, answer: Answer, environ: dict[str, Any], send: Send) -> None:
        """Send a large answer in parts. The unsent bytes of each credential or address are limited."""
        client = environ.get("HTTP_AUTHORIZATION") or requests.address_of(environ)
        size, view = len(answer.content), memoryview(answer.content)
        if not self.unsent.take_now(client, size):
            raise Refused(429, "RATE_LIMITED", "Too many answers wait to be read; read them, or try again later.")
        try:
            await start(send, answer)
            for position in range(0, size, PART_BYTES):
                await send_part(send, bytes(view[position : position + PART_BYTES]))
            await send_end(send)
        finally:
            self.unsent.give_back(client, size)

    async def send_body(self, answer: Answer, receive: Receive, send: Send) -> None:
        body: Any = answer.parts
        if answer.live:
            body = answer.live()
            self.live.add(body)
            if self.stopping:
                body.close()
        watching = asyncio.create_task(close_when_left(receive, body))
        try:
            await start(send, answer)
            part: bytes | None = answer.content
            while part is not None:
                if part:
                    await send_part(send, part)
                part = await body.next()
            await send_end(send)
        except (Gone, Broken):
            raise
        except Exception:
            logger.exception("an answer was not sent")
        finally:
            watching.cancel()
            self.live.discard(body)
            body.leave()


async def drain(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while (await receive()).get("more_body"):
                pass


async def close_when_left(receive: Receive, body: Body) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    body.close()


async def start(send: Send, answer: Answer) -> None:
    headers = [(name.lower().encode("latin1"), value.encode("latin1")) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})


async def send_part(send: Send, part: bytes) -> None:
    """Returns when there is room for the next part. Raises Gone if there is none for STREAM_STALL_SECONDS."""
    try:
        async with asyncio.timeout(settings.STREAM_STALL_SECONDS):
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except TimeoutError:
        raise Gone from None


async def send_end(send: Send, content: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": content, "more_body": False})


def refusal(status: int, code: str, message: str) -> Answer:
    """The answer to a request that Django never sees."""
    headers = [("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff")]
    headers += [("X-Request-Id", secrets.token_hex(16)), ("Connection", "close")]
    if settings.CORS_ALLOWED_ORIGINS:
        # For any origin, because the text is the same for all.
        headers += [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", "X-Request-Id")]
    return Answer(status, headers, json.dumps({"error": {"code": code, "message": message}}).encode())


def close(response: Any) -> None:
    if hasattr(response, "close"):
        response.close()
