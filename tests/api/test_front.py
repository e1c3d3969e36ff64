"""The front of the web processes, with a WSGI application of the test in place of Django."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from config import settings
from config.limits.share import Room
from config.serve import front, requests
from config.serve.front import Front

Message = dict[str, Any]


class Client:
    """One request to the application. ``arrived`` are the parts of its body, of which each takes ``seconds``; with
    ``reads`` False, the client takes nothing of the answer's body.
    """

    def __init__(self, *arrived: bytes, length: int | None = None, seconds: float = 0.0, reads: bool = True) -> None:
        self.parts, self.seconds, self.reads = list(arrived), seconds, reads
        self.headers = [(b"host", b"test"), (b"authorization", b"Bearer x")]
        if length is not None:
            self.headers.append((b"content-length", b"%d" % length))
        elif arrived:
            self.headers.append((b"transfer-encoding", b"chunked"))
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await asyncio.sleep(self.seconds)
        if not self.parts:
            return {"type": "http.disconnect"}
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts)}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not self.reads:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def call(self, app: Front, address: str = "127.0.0.1", method: str = "POST") -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "method": method,
            "raw_path": b"/",
            "query_string": b"",
            "headers": self.headers,
            "server": ("127.0.0.1", "80"),
            "client": (address, "1"),
        }
        await app(scope, self.receive, self.send)
        return (
            next((message["status"] for message in self.sent if "status" in message), 0),
            b"".join(message.get("body", b"") for message in self.sent),
        )


def echo(environ: dict[str, Any], start: Any) -> list[bytes]:
    body = environ["wsgi.input"].read()
    start("200 OK", [("X-Length", environ.get("CONTENT_LENGTH", "-"))])
    return [body]


def answering(content: bytes) -> Callable[..., list[bytes]]:
    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        start("200 OK", [])
        return [content]

    return app


def test_a_body_is_given_to_django_as_a_whole() -> None:
    client = Client(b"ab", b"cd")
    assert asyncio.run(client.call(Front(echo))) == (200, b"abcd")
    assert (b"x-length", b"4") in client.sent[0]["headers"]
    # A Content-Length beside the chunks may have told a proxy another end of the body.
    assert (b"connection", b"close") in client.sent[0]["headers"]


def test_a_body_over_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "API_MAX_BODY_BYTES", 10)
    monkeypatch.setattr(front, "DRAIN_SECONDS", 0.1)
    announced, chunked = Client(b"x" * 11, length=11, seconds=60), Client(b"x" * 8, b"y" * 8, b"z" * 8)
    assert asyncio.run(announced.call(Front(echo))) == (200, b"")  # Django refuses it by its length
    assert asyncio.run(chunked.call(Front(echo))) == (200, b"x" * 8 + b"y" * 8)


def test_a_body_has_a_rate_and_a_total_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(requests, "BODY_BYTES_PER_SECOND", 1000)
    slow, steady = Client(*[b"x"] * 30, seconds=0.05), Client(*[b"x" * 1000] * 20, seconds=0.05)
    assert asyncio.run(slow.call(Front(echo)))[0] == 408
    assert asyncio.run(steady.call(Front(echo)))[0] == 200
    monkeypatch.setattr(requests, "BODY_MAX_SECONDS", 0.5)
    assert asyncio.run(Client(*[b"x" * 1000] * 20, seconds=0.05).call(Front(echo)))[0] == 408


def test_an_address_that_fills_the_room_for_bodies_harms_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODIES_MAX_BYTES", 1_000_000)
    monkeypatch.setattr(requests, "SPOOL_BYTES", 1_000_000)  # a file counts for more
    app = Front(echo)

    async def talk() -> None:
        greedy = [Client(b"x" * 40_000, b"x", seconds=0.2) for _ in range(20)]
        calls = [asyncio.create_task(client.call(app, "192.0.2.1")) for client in greedy]
        await asyncio.sleep(0.3)
        assert (await Client(b"x" * 40_000, b"x").call(app, "192.0.2.2"))[0] == 200
        statuses = [status for status, _ in await asyncio.gather(*calls)]
        assert set(statuses) == {200, 503}
        assert app.bodies.taken == 0

    asyncio.run(talk())


def test_many_clients_leave_a_share_for_the_next() -> None:
    room = Room(1000)
    for client in range(10):
        while room.take_now(str(client), 1):
            pass
    assert room.take_now("next", 10)
    assert not room.take_now("next", 1000)
    before = room.taken
    room.give_back("next", 10)
    assert room.taken == before - 10


def test_unsent_answers_of_a_credential_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "UNSENT_MAX_BYTES", 1_500_000)
    monkeypatch.setattr(settings, "STREAM_STALL_SECONDS", 0.5)
    app = Front(answering(b"x" * 300_000))

    async def talk() -> None:
        stalled = Client(reads=False)
        waiting = asyncio.create_task(stalled.call(app))
        await asyncio.sleep(0.2)
        status, body = await Client().call(app)
        assert (status, json.loads(body)["error"]["code"]) == (429, "RATE_LIMITED")
        await waiting  # given up, and its bytes are free
        assert app.unsent.taken == 0
        assert await Client().call(app) == (200, b"x" * 300_000)

    asyncio.run(talk())


class Parts:
    """A body that does not say that it is streamed, like a wrapper of a library."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.count, self.fails = count, fails
        self.taken = self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self.count):
            self.taken += 1
            yield b"part"
        if self.fails:
            raise OSError("the storage is away")

    def close(self) -> None:
        self.closed += 1


def called(client: Client, body: Parts, method: str = "POST") -> None:
    app = Front(lambda environ, start: start("200 OK", []) or body)
    asyncio.run(client.call(app, method=method))
    app.threads.shutdown()


@pytest.mark.parametrize("reads", [True, False])
def test_a_body_is_made_as_its_client_reads(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(settings, "STREAM_STALL_SECONDS", 0.2)
    body = Parts(3)
    client = Client(b"", length=0, reads=reads, seconds=0.5)
    called(client, body)
    assert (body.taken, body.closed) == ((3, 1) if reads else (1, 1))


def test_a_body_that_fails_is_closed_and_has_no_end() -> None:
    body = Parts(2, fails=True)
    client = Client(b"", length=0, seconds=0.5)
    called(client, body)
    assert body.closed == 1
    assert client.sent[-1]["more_body"] is True


def test_a_body_is_not_made_for_head() -> None:
    body, client = Parts(3), Client(b"", length=0, seconds=0.5)
    called(client, body, "HEAD")
    assert (body.taken, body.closed) == (0, 1)
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_an_error_outside_of_django_is_500() -> None:
    def fails(environ: dict[str, Any], start: Any) -> list[bytes]:
        raise RuntimeError("not for clients")

    status, body = asyncio.run(Client().call(Front(fails)))
    assert (status, json.loads(body)["error"]["code"]) == (500, "INTERNAL_ERROR")
    assert b"not for clients" not in body


@pytest.mark.parametrize("origins", [[], ["https://app.example.com"]])
def test_refusals_before_django_are_readable_by_apps(monkeypatch: pytest.MonkeyPatch, origins: list[str]) -> None:
    monkeypatch.setattr(settings, "CORS_ALLOWED_ORIGINS", origins)
    client = Client()
    client.headers.append((b"x-large", b"x" * 20_000))
    assert asyncio.run(client.call(Front(echo)))[0] == 431
    headers = dict(client.sent[0]["headers"])
    assert (headers.get(b"access-control-allow-origin") == b"*") is bool(origins)
    assert headers[b"x-request-id"]
