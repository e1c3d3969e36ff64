"""The web server's connections, in this process: limits of what arrives, and answers that are sent part by part."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from config import settings
from config.api import live
from config.serve.server import Server
from config.serve.state import State
from tests.tiers import slow

Talk = Callable[["Service"], Awaitable[None]]
HEAD = b"Host: test\r\n"
GET = b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n"


class Parts:
    """A body of which a test sees how many parts were taken, and whether it was closed. Like a wrapper of a library, it
    does not say that it is streamed.
    """

    def __init__(self, count: int, part: bytes, fails: bool = False) -> None:
        self.count, self.part, self.fails = count, part, fails
        self.taken = self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self.count):
            self.taken += 1
            yield self.part
        if self.fails:
            raise OSError("the storage is away")

    def close(self) -> None:
        self.closed += 1


class Live:
    """A live body that a test feeds."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.left = False

    def admitted(self) -> Any:
        return self

    def open(self) -> Any:
        return self

    async def next(self) -> bytes | None:
        return await self.parts.get()

    def close(self) -> None:
        self.parts.put_nowait(None)

    def leave(self) -> None:
        self.left = True


class Service:
    """A server and its clients."""

    def __init__(self, state: State, server: Server, port: int) -> None:
        self.state, self.server, self.port = state, server, port
        self.writers: list[asyncio.StreamWriter] = []  # one that nothing refers to would close its connection

    async def client(
        self, *sent: bytes, source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24, local_addr=(source, 0))
        self.writers.append(writer)
        for part in sent:
            writer.write(part)
        await writer.drain()
        return reader, writer

    async def ask(self, *sent: bytes) -> bytes:
        """Everything that the server sends until it closes the connection."""
        reader, writer = await self.client(*sent)
        async with asyncio.timeout(20):
            received = await reader.read(-1)
        writer.close()
        return received


def serve(app: Any, talk: Talk, keepalive: float = 30, connections_max: int = 100) -> None:
    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        state = State(app, 2, keepalive)
        server = Server(state, [listener], connections_max)

        async def tick() -> None:
            while True:
                await server.tick()
                await asyncio.sleep(0.02)

        ticking = asyncio.create_task(tick())
        try:
            async with asyncio.timeout(30):
                await talk(Service(state, server, listener.getsockname()[1]))
        finally:
            ticking.cancel()
            state.stopping = True
            await server.tick()
            listener.close()
            state.threads.shutdown(wait=False)

    asyncio.run(main())


def echo(environ: dict[str, Any], start: Any) -> list[bytes]:
    body = environ["wsgi.input"].read()
    start("200 OK", [("X-Length", environ.get("CONTENT_LENGTH", "-"))])
    return [body[:100]]


def post(length: int | None = None, path: bytes = b"/") -> bytes:
    framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    return b"POST " + path + b" HTTP/1.1\r\n" + HEAD + framing + b"\r\n\r\n"


async def until(predicate: Callable[[], bool]) -> None:
    while not predicate():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("setting", ["WEB_BODIES_MAX_BYTES", "WEB_ADDRESS_BODIES_MAX_BYTES"])
def test_bodies_share_a_limit_and_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(settings, setting, 1_000_000)

    async def talk(service: Service) -> None:
        bodies = service.state.bodies
        first, _ = await service.client(post(900_000), b"x" * 450_000)
        await until(lambda: bodies.size == 450_000)
        _, second = await service.client(post(900_000), b"x" * 450_000)
        await until(lambda: bodies.size == 900_000)
        third, _ = await service.client(post(200_000), b"x" * 200_000)
        assert b"503" in await first.readline()
        assert b"200" in await third.readline()
        second.write(b"x" * 450_000)
        await until(lambda: not bodies.shares)
        assert bodies.size == 0

    serve(echo, talk)


@pytest.mark.parametrize(("of_all", "of_one"), [(1_000_000, 1_000_000), (10_000_000, 500_000)])
def test_an_address_that_fills_the_room_for_bodies_harms_only_itself(
    monkeypatch: pytest.MonkeyPatch, of_all: int, of_one: int
) -> None:
    monkeypatch.setattr(settings, "WEB_BODIES_MAX_BYTES", of_all)
    monkeypatch.setattr(settings, "WEB_ADDRESS_BODIES_MAX_BYTES", of_one)
    room = min(of_all, of_one)

    async def talk(service: Service) -> None:
        bodies = service.state.bodies
        modest, sending = await service.client(post(200_000), b"x" * 100_000)
        await until(lambda: bodies.size == 100_000)
        for _ in range(30):
            await service.client(post(900_000), b"x" * 100_000, source="127.0.0.2")
        await until(lambda: len(service.state.connections) == 31 and bodies.size >= room - 100_000)
        later, _ = await service.client(post(100_000), b"x" * 100_000)
        sending.write(b"x" * 100_000)
        assert b"200" in await modest.readline()
        assert b"200" in await later.readline()
        assert bodies.size <= room

    serve(echo, talk)


@pytest.mark.parametrize("origins", [[], ["https://app.example.com"]])
def test_refusals_before_django_are_readable_by_apps(monkeypatch: pytest.MonkeyPatch, origins: list[str]) -> None:
    monkeypatch.setattr(settings, "CORS_ALLOWED_ORIGINS", origins)
    monkeypatch.setattr(settings, "WEB_BODIES_MAX_BYTES", 1_000_000)
    monkeypatch.setattr(settings, "API_MAX_BODY_BYTES", 2_000_000)
    large = b"Authorization: Bearer " + b"x" * 20_000 + b"\r\nOrigin: https://app.example.com\r\n\r\n"

    async def talk(service: Service) -> None:
        for status, sent in (
            (b"431", b"GET / HTTP/1.1\r\n" + HEAD + large),
            (b"414", b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n"),
            (b"503", post(1_500_000) + b"x" * 1_100_000),
            (b"500", GET),
        ):
            head, _, body = (await service.ask(sent)).partition(b"\r\n\r\n")
            assert head.split()[1] == status
            assert (b"Access-Control-Allow-Origin: *" in head) is bool(origins)
            assert b"X-Request-Id: " in head
            assert b'"code"' in body

    def fails(environ: dict[str, Any], start: Any) -> list[bytes]:
        raise OSError

    serve(fails, talk, keepalive=0)


def test_a_body_has_a_rate_and_a_total_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WEB_READ_SECONDS", 0.3)
    monkeypatch.setattr(settings, "WEB_READ_BYTES_PER_SECOND", 1000)
    monkeypatch.setattr(settings, "WEB_BODY_SECONDS", 600)

    async def is_closed(service: Service, part: bytes) -> bool:
        """Whether the server closes the connection, without an answer, while ``part`` is sent again and again."""
        reader, writer = await service.client(post(1_000_000))
        answer = asyncio.ensure_future(reader.read(-1))
        while not answer.done():
            writer.write(part)
            await asyncio.sleep(0.05)
        # The server closes while a part is on its way, which may reset the connection.
        return isinstance(answer.exception(), ConnectionResetError) or answer.result() == b""

    async def talk(service: Service) -> None:
        # Slower than the rate, faster than the rate, and faster but without end.
        assert await is_closed(service, b"x")
        reader, writer = await service.client(post(1_000))
        for _ in range(10):
            writer.write(b"x" * 100)
            await asyncio.sleep(0.05)
        assert b"200" in await reader.readline()
        monkeypatch.setattr(settings, "WEB_BODY_SECONDS", 1.5)
        assert await is_closed(service, b"x" * 100)
        await until(lambda: service.state.bodies.size == 0)

    serve(echo, talk)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: "], ids=["silent", "head"])
def test_a_head_has_a_hard_limit(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(settings, "WEB_READ_SECONDS", 0.4)

    async def talk(service: Service) -> None:
        reader, writer = await service.client(sent)
        ended = asyncio.ensure_future(reader.read(-1))
        begun = asyncio.get_running_loop().time()
        while not ended.done():
            if sent:
                writer.write(b"x" * 1000)  # no number of bytes buys time
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - begun < 3

    serve(echo, talk)


@pytest.mark.slow
def test_each_request_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WEB_READ_SECONDS", 2)

    async def talk(service: Service) -> None:
        reader, writer = await service.client(GET)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.8)  # of one second of idle time
        for part in (GET[:10], GET[10:]):
            writer.write(part)
            await asyncio.sleep(0.5)
        assert b"200" in await reader.readline()

    serve(echo, talk, keepalive=1)


def test_a_connection_serves_many_requests_until_it_is_idle() -> None:
    async def talk(service: Service) -> None:
        received = await service.ask(GET * 3, post(3), b"abc", GET)
        assert received.count(b"HTTP/1.1 200 OK") == 5
        assert b"\r\n\r\nabcHTTP/1.1" in received

    serve(echo, talk, keepalive=0.3)


def test_a_body_is_streamed_as_its_client_reads() -> None:
    body = Parts(400, b"x" * 100_000)

    def app(environ: dict[str, Any], start: Any) -> Parts:
        start("200 OK", [("Content-Length", "40000000")])
        return body

    async def talk(service: Service) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while body.taken != before:
            before = body.taken
            await asyncio.sleep(0.2)
        assert body.taken < 200  # what the buffers of both sides hold
        async with asyncio.timeout(20):
            await reader.readexactly(40_000_000)
        await until(lambda: body.closed == 1)
        writer.close()

    serve(app, talk)


@pytest.mark.parametrize("reads", [False, *slow(True)])
def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    from django.conf import settings as django_settings

    for each in (settings, django_settings):
        monkeypatch.setattr(each, "STREAM_STALL_SECONDS", 0.5)
    body = Parts(400, b"x" * 100_000)

    def app(environ: dict[str, Any], start: Any) -> Parts:
        start("200 OK", [])
        return body

    async def talk(service: Service) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1000)
        writer.write(GET)
        if reads:  # slowly, but all the time
            for _ in range(30):
                await reader.read(100_000)
                await asyncio.sleep(0.05)
            assert (body.closed, len(service.state.connections)) == (0, 1)
        await until(lambda: body.closed == 1 and not service.state.connections)
        assert body.taken < 400
        writer.close()

    serve(app, talk)


def test_a_body_that_fails_is_not_taken_for_a_whole_one() -> None:
    body = Parts(2, b"part", fails=True)

    def app(environ: dict[str, Any], start: Any) -> Parts:
        start("200 OK", [])
        return body

    async def talk(service: Service) -> None:
        received = await service.ask(GET)
        assert received.endswith(b"4\r\npart\r\n4\r\npart\r\n")  # without the last chunk
        assert body.closed == 1

    serve(app, talk)


def test_an_answer_to_head_has_no_body() -> None:
    body = Parts(2, b"part")

    def app(environ: dict[str, Any], start: Any) -> Any:
        start("200 OK", [("Content-Length", "8")])
        return body if environ["PATH_INFO"] == "/parts" else [b"whole..."]

    async def talk(service: Service) -> None:
        for path in (b"/parts", b"/"):
            received = await service.ask(b"HEAD " + path + b" HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n")
            assert received.endswith(b"\r\n\r\n")
            assert b"Content-Length: 8" in received
        assert body.closed == 1

    serve(app, talk)


def test_an_error_outside_of_django_is_500() -> None:
    def app(environ: dict[str, Any], start: Any) -> Any:
        raise RuntimeError("not for clients")

    async def talk(service: Service) -> None:
        received = await service.ask(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"INTERNAL_ERROR" in received
        assert b"not for clients" not in received

    serve(app, talk)


def live_app(bodies: list[Live]) -> Any:
    def app(environ: dict[str, Any], start: Any) -> Any:
        bodies.append(Live())
        live.offer(SimpleNamespace(META=environ), bodies[-1])  # type: ignore[arg-type]
        start("200 OK", [("Content-Type", "text/event-stream")])
        return [b"for other servers"]

    return app


def test_a_live_body_holds_no_thread_and_ends_when_its_client_leaves() -> None:
    bodies: list[Live] = []

    async def talk(service: Service) -> None:
        clients = [await service.client(GET) for _ in range(10)]  # of 2 threads
        await until(lambda: len(bodies) == 10)
        for number, body in enumerate(bodies):
            body.parts.put_nowait(b"%d" % number)
        received = [(await reader.readuntil(b"\r\n\r\n"), await reader.readexactly(6))[1] for reader, _ in clients]
        assert sorted(received) == [b"1\r\n%d\r\n" % number for number in range(10)]
        clients[0][1].close()
        await until(lambda: sum(body.left for body in bodies) == 1)
        for connection in list(service.state.connections):
            connection.stop()
        for reader, _ in clients[1:]:
            assert (await reader.readline(), await reader.readline()) == (b"0\r\n", b"\r\n")  # an end in order
        assert all(body.left for body in bodies)

    serve(live_app(bodies), talk)


def test_the_next_request_waits_for_the_end_of_a_live_body() -> None:
    bodies: list[Live] = []

    async def talk(service: Service) -> None:
        reader, _ = await service.client(GET, GET)
        await until(lambda: len(bodies) == 1)
        bodies[0].parts.put_nowait(None)
        await until(lambda: len(bodies) == 2)
        assert bodies[0].left
        bodies[1].parts.put_nowait(None)
        assert (await reader.readuntil(b"0\r\n\r\n")).count(b"200 OK") == 1

    serve(live_app(bodies), talk)


def test_a_process_at_its_limit_accepts_again_after_an_end() -> None:
    async def talk(service: Service) -> None:
        _, first = await service.client()
        await service.client()
        await until(lambda: len(service.state.connections) == 2)
        reader, _ = await service.client(GET)
        answer = asyncio.ensure_future(reader.readline())
        await asyncio.sleep(0.3)
        assert not answer.done()
        first.close()
        assert b"200" in await answer

    serve(echo, talk, connections_max=2)


def test_a_stop_answers_what_has_arrived_and_closes_idle_connections() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        begun.set()
        may_end.wait(20)
        return echo(environ, start)

    async def talk(service: Service) -> None:
        idle, _ = await service.client()
        half, _ = await service.client(b"GET / HTTP/1.1\r\nX: ")
        body, sending = await service.client(post(6), b"abc")
        working, _ = await service.client(GET)
        await until(lambda: begun.is_set() and len(service.state.connections) == 4 and service.state.bodies.size == 3)
        stopping = asyncio.create_task(service.server.stop())
        assert await idle.read(-1) == await half.read(-1) == b""
        with pytest.raises(ConnectionError):
            await service.ask(GET)
        sending.write(b"def")
        may_end.set()
        for reader in (working, body):
            received = await reader.read(-1)
            assert (b"200 OK" in received, b"Connection: close" in received) == (True, True)
        for writer in service.writers:
            writer.close()
        await stopping

    serve(app, talk)
