"""Connections that the web process has closed, and whose clients stay, do not delay other users' requests."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.isolation.compare import assert_isolated
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

CONNECTIONS = 40


def test_clients_that_stay_after_the_end_do_not_delay_other_users(stack: StreamStack) -> None:
    modest = stack.session("modest-connections")
    head = (
        f"GET /api/v1/me HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {stack.token('greedy-connections')}\r\n"
    )

    @contextlib.contextmanager
    def staying() -> Iterator[None]:
        with contextlib.ExitStack() as opened:
            for _ in range(CONNECTIONS):
                connection = opened.enter_context(socket.create_connection(("127.0.0.1", stack.port), timeout=15))
                connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
            yield

    def act() -> None:
        assert modest.get("/me").status_code == 200

    assert_isolated(act, staying)
