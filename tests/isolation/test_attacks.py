"""What anonymous clients send to stop a web process: meanwhile others are answered, and its memory is bounded."""

import contextlib
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import requests

from tests.isolation.compare import p99, timed
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.alone, pytest.mark.timeout(300)]

SECONDS = 3.0
P99_SECONDS = 1.0
MEMORY_MAX = 400 * 2**20
IDLE = 10_000
GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
POST = (
    b"POST /api/v1/chats HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
BYTE = b"1\r\n \r\n"


class Flood:
    """``count`` connections that send ``first``, then ``again`` without end, and read nothing. One that the server
    closes is opened again.
    """

    def __init__(self, port: int, count: int, first: bytes, again: bytes) -> None:
        self.port, self.first, self.again = port, first, again
        self.left = {self.open(): first for _ in range(count)}
        self.sent = 0

    def open(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=15)
        connection.setblocking(False)
        return connection

    def send(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            for connection in select.select([], list(self.left), [], 0.1)[1]:
                try:
                    count = connection.send(self.left[connection])
                    self.sent += count
                    self.left[connection] = self.left[connection][count:] or self.again
                except OSError:
                    connection.close()
                    del self.left[connection]
                    self.left[self.open()] = self.first
        for connection in self.left:
            connection.close()


@contextlib.contextmanager
def flooding(port: int, count: int, first: bytes, again: bytes) -> Iterator[Flood]:
    flood, stopped = Flood(port, count, first, again), threading.Event()
    thread = threading.Thread(target=flood.send, args=(stopped,))
    thread.start()
    try:
        yield flood
    finally:
        stopped.set()
        thread.join(30)


@contextlib.contextmanager
def idling(port: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 2000:
        pytest.skip(f"{IDLE} connections need more open files than the system allows ({hard})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as connections:
            for _ in range(IDLE):
                connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=15))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ATTACKS: dict[str, Callable[[int], contextlib.AbstractContextManager[object]]] = {
    "chunks of one byte": lambda port: flooding(port, 60, POST + BYTE, BYTE * 2000),
    "pipelined requests": lambda port: flooding(port, 4, GET * 1000, GET * 1000),
    "a trailer without end": lambda port: flooding(port, 20, POST + BYTE + b"0\r\nX: ", b"a" * 10_000),
    "trailers without end": lambda port: flooding(port, 20, POST + BYTE + b"0\r\n", b"X-A: " + b"a" * 100 + b"\r\n"),
    "idle connections": idling,
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_delays_nobody_and_fills_no_memory(stack: StreamStack, kind: str) -> None:
    session = stack.session("modest-attacks")
    web = psutil.Process(stack.processes["web"].pid)
    probing = requests.Session()
    probing.trust_env = False
    took: list[float] = []
    used = 0
    session.get("/me")
    with ATTACKS[kind](stack.port):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            for ask in (
                lambda: probing.get(f"{stack.url}/livez", timeout=15),
                lambda: session.get("/me"),
                # A client that has no connection yet.
                lambda: requests.get(f"{stack.url}/livez", timeout=15),
            ):
                took.append(timed(lambda ask=ask: ask().raise_for_status()))
            used = max(used, *(process.memory_info().rss for process in [web, *web.children()]))
    assert p99(took) <= P99_SECONDS
    assert used <= MEMORY_MAX
