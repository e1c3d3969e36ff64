"""Attachment bytes: uploads and downloads that a user keeps open leave the web process's threads to other users."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.driver import until
from tests.isolation.compare import assert_isolated
from tests.stack.stack import Client
from tests.streams.conftest import StreamStack
from tests.threads import Repeating

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

SIZE = 20 * 1024 * 1024
LIMIT = 10
# More than a web process has threads.
TRANSFERS = 24


def announce(client: Client, size: int) -> dict[str, Any]:
    answer = client.post("/attachments", {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": size})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def store(client: Client, content: bytes) -> str:
    attachment = announce(client, len(content))
    assert client.put(attachment["upload"]["url"], content).status_code == 204
    assert client.post(f"/attachments/{attachment['id']}/complete").status_code == 200
    return str(attachment["id"])


class Transfers:
    """Uploads that send a little from time to time, and downloads that read nothing.

    An upload counts as a transfer when its whole body has arrived, so only downloads are refused.
    """

    def __init__(self, stack: StreamStack, client: Client, upload: str, stored: str) -> None:
        self.connections: list[socket.socket] = []
        host = f"Host: 127.0.0.1\r\nAuthorization: Bearer {client.credential}\r\n"
        put = (
            f"PUT {urlsplit(upload).path} HTTP/1.1\r\n{host}Content-Type: text/plain\r\nContent-Length: {SIZE}\r\n\r\n"
        )
        get = f"GET /api/v1/attachments/{stored}/content HTTP/1.1\r\n{host}\r\n"
        self.uploads = [self.connect(stack.port, put) for _ in range(TRANSFERS // 2)]
        self.downloads = [self.connect(stack.port, get) for _ in range(TRANSFERS // 2)]
        self.sending = Repeating(self.send)

    def connect(self, port: int, head: str) -> socket.socket:
        connection = socket.socket()
        # A small window, so that the server cannot send the whole file into the buffers.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(15)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head.encode())
        self.connections.append(connection)
        return connection

    def send(self) -> None:
        for connection in self.uploads:
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * 1024)

    def refused(self) -> int:
        """How many of the transfers were answered with 429."""
        found = 0
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.settimeout(0)
                found += b" 429 " in connection.recv(64, socket.MSG_PEEK)
                connection.settimeout(15)
        return found

    def stop(self) -> None:
        self.sending.stop()
        for connection in self.connections:
            connection.close()


def test_slow_transfers_of_one_user_do_not_delay_other_users(stack: StreamStack) -> None:
    greedy, modest = stack.session("greedy-files"), stack.session("modest-files")
    upload, stored = announce(greedy, SIZE)["upload"]["url"], store(greedy, b"x" * SIZE)

    def act() -> None:
        attachment = store(modest, b"modest")
        assert modest.get(f"/attachments/{attachment}/content").content == b"modest"

    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        transfers = Transfers(stack, greedy, upload, stored)
        try:
            until(lambda: transfers.refused() == TRANSFERS // 2 - LIMIT, 20)
            yield
            assert transfers.refused() == TRANSFERS // 2 - LIMIT, "a transfer ended early"
        finally:
            transfers.stop()
        # The places are free again once the connections are closed.
        until(lambda: greedy.get(f"/attachments/{stored}/content").status_code == 200, 10)

    assert_isolated(act, slow)
