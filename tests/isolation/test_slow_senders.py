"""Clients that send their requests slowly hold no thread of the web process, and only for a limited time."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import requests

from tests.isolation.compare import assert_isolated
from tests.isolation.conftest import BODY_SECONDS, HEAD_SECONDS
from tests.streams.conftest import StreamStack
from tests.threads import Repeating

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

CONNECTIONS = 200
# A body has a second more for the bytes that arrive here, and 2 for its answer. The rest is for a busy machine.
CLOSED_AFTER_SECONDS = max(HEAD_SECONDS, BODY_SECONDS) + 20
BEGINNINGS = {
    "head": "GET /api/v1/me HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    "body": "POST /api/v1/chats HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{credential}"
    "Content-Length: 1000000\r\n\r\n ",
    "form": "POST /admin/login/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    "Transfer-Encoding: chunked\r\n\r\n100000\r\n ",
}


class Slow:
    """Connections of one kind that send a byte from time to time. ``left`` are those that the server has not closed."""

    def __init__(self, port: int, beginning: str) -> None:
        self.left: list[socket.socket] = []
        for _ in range(CONNECTIONS):
            connection = socket.create_connection(("127.0.0.1", port), timeout=15)
            connection.sendall(beginning.encode())
            connection.setblocking(False)
            self.left.append(connection)
        self.sending = Repeating(self.send)

    def send(self) -> None:
        self.left = [connection for connection in self.left if self.sent(connection)]

    def sent(self, connection: socket.socket) -> bool:
        try:
            connection.send(b" ")
            return bool(connection.recv(1000))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def stop(self) -> None:
        self.sending.stop()
        for connection in self.left:
            connection.close()


def test_slow_senders_do_not_delay_other_users(stack: StreamStack) -> None:
    modest = stack.session("modest-senders")
    credential = f"Authorization: Bearer {stack.token('greedy-senders')}\r\n"
    probing = requests.Session()
    probing.trust_env = False

    @contextlib.contextmanager
    def sending() -> Iterator[None]:
        slow = {name: Slow(stack.port, text.format(credential=credential)) for name, text in BEGINNINGS.items()}
        begun = time.monotonic()
        try:
            yield
            while any(kind.left for kind in slow.values()) and time.monotonic() < begun + CLOSED_AFTER_SECONDS:
                time.sleep(0.2)
            left = {name: len(kind.left) for name, kind in slow.items() if kind.left}
            assert left == {}, f"these are open after {CLOSED_AFTER_SECONDS} s"
        finally:
            for kind in slow.values():
                kind.stop()

    def act() -> None:
        assert modest.get("/me").status_code == 200
        assert probing.get(f"{stack.url}/livez", timeout=15).status_code == 200

    assert_isolated(act, sending)
