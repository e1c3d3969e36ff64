"""The ASGI application: bodies are read, and answers and streams are sent, on the event loop. Django makes the answers,
through WSGI on a bounded number of threads.

A thread works on a request only after the whole request has arrived, and only until its answer is made. A client that
sends or reads slowly occupies memory, which is limited, and no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.http import FileResponse

from config import settings
from config.api.live import KEY, Body
from config.limits.share import Room
from config.queue import publisher
from config.serve import requests
from config.serve.requests import Refused

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# The time of a body, which each such number of bytes that have arrived extends by a second, and its limit.
BODY_SECONDS, BODY_BYTES_PER_SECOND, BODY_MAX_SECONDS = 15.0, 1024, 600.0
# How long the rest of a body that is not used is read. A client that still sends could not read the answer if the
# connection were reset.
DRAIN_SECONDS = 2.0
# Larger answers are sent in parts of this size, as the client reads them.
PART_BYTES = 64 * 1024
# Of all answers larger than PART_BYTES that are not sent yet.
UNSENT_MAX_BYTES = 128 * 1024 * 1024
PARENT_SECONDS = 1.0
# Files are read in parts of a size that is worth a change of threads.
FileResponse.block_size = PART_BYTES


class Gone(Exception):
    """The client has left, or it reads nothing."""


class Answer:
    """Status, headers and the body: ``content``, and after it the ``parts``, or a ``live`` body."""

    def __init__(self, status: str, headers: list[tuple[str, str]], content: bytes = b"") -> None:
        self.status, self.headers, self.content = int(status[:3]), headers, content
        self.live: Callable[[], Body] | None = None
        self.parts: Iterator[bytes] | None = None
        self.response: Any = None
        self.context = contextvars.copy_context()  # of the thread that made the answer, with the request's id

    def next(self) -> bytes | None:
        return self.context.run(next, self.parts, None)  # type: ignore[arg-type]

    def close(self) -> None:
        self.context.run(close, self.response)


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
        except Gone:
            pass

    # --- start and stop ----------------------------------------------------------------------------------------------

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        # The server has its own handler of both signals already, and waits until all connections are closed.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        watching = asyncio.create_task(self.watch_parent())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watching.cancel()
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
        body = requests.expected_body(environ, self.bodies)
        rest = body is None and "CONTENT_LENGTH" in environ
        try:
            if body is not None:
                rest = not await read(body, receive)
                body.file.seek(0)
                environ["wsgi.input"] = body.file
                environ["CONTENT_LENGTH"] = str(body.size)
            answer = await asyncio.get_running_loop().run_in_executor(self.threads, self.call, environ)
        finally:
            if body is not None:
                body.close()
        if chunked:
            # With a Content-Length beside it, which this server ignores, a proxy in front may see another end of the
            # body: nothing that follows on the connection is taken for a request (RFC 9112, section 6.3).
            answer.headers.append(("Connection", "close"))
        if answer.live is not None:
            await self.send_live(answer, answer.live, receive, send)
        elif answer.parts is not None:
            await self.send_parts(answer, receive, send)
        elif len(answer.content) > PART_BYTES:
            await self.send_large(answer, environ, send)
        else:
            await start(send, answer)
            await send_end(send, answer.content)
        if rest and "HTTP_EXPECT" not in environ:
            await drain(receive)

    def call(self, environ: dict[str, Any]) -> Answer:
        """Django's answer. Works on a thread."""
        started: list[Any] = []
        try:
            response = self.django(environ, lambda *given: started.extend(given))
            if KEY in environ and started[0].startswith("200 "):
                live = environ[KEY]
                close(response)
                admitted = live.admitted()
                if admitted is not live:
                    return Answer(str(admitted.status_code), list(admitted.items()), b"".join(admitted))
                answer = Answer(*started[:2])
                answer.live = live.open
                return answer
            answer = Answer(*started[:2])
            # Libraries wrap responses: what does not say that it is whole may be large, or may never end.
            if getattr(response, "streaming", not isinstance(response, (list, tuple))):
                answer.parts, answer.response = iter(response), response
                answer.content = next(answer.parts, b"")
            else:
                answer.content = b"".join(response)
                close(response)
            return answer
        except Exception:
            logger.exception("a request failed outside of Django")
            return refusal(500, "INTERNAL_ERROR", "Something went wrong on our side.")

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send_large(self, answer: Answer, environ: dict[str, Any], send: Send) -> None:
        """An answer of which the system holds a part. The unsent bytes of a credential have a limit."""
        client = environ.get("HTTP_AUTHORIZATION") or requests.address_of(environ)
        size = len(answer.content)
        if not self.unsent.take_now(client, size):
            raise Refused(429, "RATE_LIMITED", "Too many answers wait to be read; read them, or try again later.")
        try:
            await start(send, answer)
            view = memoryview(answer.content)
            for position in range(0, size, PART_BYTES):
                await send_part(send, bytes(view[position : position + PART_BYTES]))
            await send_end(send)
        finally:
            self.unsent.give_back(client, size)

    async def send_parts(self, answer: Answer, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with leaving(receive) as left:
                await start(send, answer)
                part: bytes | None = answer.content
                while part is not None and not left.done():
                    if part:
                        await send_part(send, part)
                    part = await loop.run_in_executor(self.threads, answer.next)
                await send_end(send)
        except Exception:
            # The connection breaks if the answer has a length; without one, its end cannot be told from the whole.
            logger.exception("an answer was not sent")
        finally:
            await loop.run_in_executor(self.threads, answer.close)

    async def send_live(self, answer: Answer, live: Callable[[], Body], receive: Receive, send: Send) -> None:
        body = live()
        self.live.add(body)
        try:
            async with leaving(receive) as left:
                left.add_done_callback(lambda _: body.close())
                if self.stopping:
                    body.close()
                await start(send, answer)
                while (part := await body.next()) is not None:
                    await send_part(send, part)
                await send_end(send)
        finally:
            self.live.discard(body)
            body.leave()


async def read(body: requests.Body, receive: Receive) -> bool:
    """Read the body. False if it is larger than its limit. Raises Refused."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(None) as limit:
            while True:
                allowed = min(BODY_SECONDS + body.size / BODY_BYTES_PER_SECOND, BODY_MAX_SECONDS)
                limit.reschedule(begun + allowed)
                message = await receive()
                if message["type"] == "http.disconnect":  # or the rest is not valid HTTP
                    raise Refused(400, "VALIDATION_ERROR", "The request's body is incomplete.")
                if not body.add(message["body"]):
                    return False
                if not message["more_body"]:
                    return True
    except TimeoutError:
        raise Refused(408, "VALIDATION_ERROR", "The request's body did not arrive in time.") from None
    except OSError:
        logger.exception("a body cannot be kept in the directory for temporary files")
        raise Refused(503, "UNAVAILABLE", "The server cannot receive this at the moment; try again.") from None


async def drain(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while (await receive()).get("more_body"):
                pass


@contextlib.asynccontextmanager
async def leaving(receive: Receive) -> Any:
    """A task that ends when the client has left."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(wait())
    try:
        yield task
    finally:
        task.cancel()


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
    headers = [
        ("Content-Type", "application/json"),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Request-Id", secrets.token_hex(16)),
        ("Connection", "close"),
    ]
    if settings.CORS_ALLOWED_ORIGINS:
        # For any origin, because the text is the same for all.
        headers += [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", "X-Request-Id")]
    return Answer(str(status), headers, json.dumps({"error": {"code": code, "message": message}}).encode())


def close(response: Any) -> None:
    if hasattr(response, "close"):
        response.close()
