"""Places of streams: STREAMS_PER_USER over all processes, then 429; other users' streams open and deliver as before."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.driver import Driver, until
from tests.isolation.compare import assert_isolated
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

LIMIT = 50
MORE = 20
# A place that nobody gives back would end after its lease of 15 s.
AT_ONCE_SECONDS = 5


class Opener:
    """Opens streams of one run, and keeps them open."""

    def __init__(self, stack: StreamStack, user: str) -> None:
        self.stack, self.token = stack, stack.token(user)
        self.run = Driver(stack.session(user)).ask("/ask Which?")["id"]
        self.open: list[HTTPConnection] = []

    def one(self, server: str) -> HTTPResponse:
        address = urlsplit({"web": self.stack.url, "stream": self.stack.stream_url}[server])
        connection = HTTPConnection("127.0.0.1", int(address.port or 0), timeout=15)
        connection.request("GET", f"/api/v1/runs/{self.run}/stream", headers={"Authorization": f"Bearer {self.token}"})
        answer = connection.getresponse()
        if answer.status == 200:
            # The first bytes come once the stream is open. The response keeps the socket.
            answer.readline()
            self.open.append(connection)
            connection.stream = answer  # type: ignore[attr-defined]
        return answer

    def abort(self, connection: Any) -> None:
        """Reset the connection, as a client that crashes does."""
        raw = connection.stream.fp.raw._sock
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.stream.close()
        connection.close()

    def close(self) -> None:
        while self.open:
            self.abort(self.open.pop())


@contextlib.contextmanager
def opener(stack: StreamStack, user: str) -> Iterator[Opener]:
    one = Opener(stack, user)
    try:
        yield one
    finally:
        one.close()


def test_one_more_than_the_limit_is_429_in_every_process(stack: StreamStack) -> None:
    with opener(stack, "many-streams") as streams:
        for number in range(LIMIT):
            assert streams.one("stream" if number % 2 else "web").status == 200
        for server in ("web", "stream"):
            refused = streams.one(server)
            assert refused.status == 429
            assert b'"RATE_LIMITED"' in refused.read()
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.headers["X-Request-Id"]
        for server in ("web", "stream"):
            streams.abort(streams.open.pop())
            until(lambda server=server: streams.one(server).status == 200, AT_ONCE_SECONDS)
        assert streams.one("web").status == 429


def test_places_of_a_killed_process_end_with_their_lease(stack: StreamStack) -> None:
    with opener(stack, "killed-streams") as streams:
        for _ in range(LIMIT):
            assert streams.one("stream").status == 200
        stack.kill("stream")
        stack.restart("stream")
        stack.wait_for(stack.stream_answers, 60, "the stream process's readiness")
        until(lambda: streams.one("stream").status == 200, 30)


@pytest.mark.parametrize("server", ["web", "stream"])
def test_streams_of_one_user_do_not_delay_other_users(stack: StreamStack, server: str) -> None:
    modest = Driver(stack.session(f"modest-{server}"))
    listener = stack.listener(server, f"modest-{server}")

    def act() -> None:
        assert listener.all(modest.start("Hello")["id"])[-1][2]["status"] == "completed"

    @contextlib.contextmanager
    def many() -> Iterator[None]:
        with opener(stack, f"greedy-{server}") as streams:
            assert [streams.one(server).status for _ in range(LIMIT)] == [200] * LIMIT
            assert {streams.one(server).status for _ in range(MORE)} == {429}
            assert len(streams.open) == LIMIT
            yield

    assert_isolated(act, many)
