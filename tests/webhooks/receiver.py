"""A webhook receiver on loopback with configurable behaviour, including faults."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

READ_TIMEOUT_SECONDS = 20


@dataclass
class Received:
    """One received request. ``headers`` keep their order and their names' case."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


Behaviour = Callable[["Receiver", socket.socket, Received], None]


def answer(status: int = 200, body: bytes = b"ok", headers: str = "") -> Behaviour:
    def behave(receiver: Receiver, connection: socket.socket, request: Received) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)

    return behave


def redirect(location: str) -> Behaviour:
    return answer(302, b"", f"Location: {location}\r\n")


def hang(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    receiver.stopped.wait()


def held(release: threading.Event) -> Behaviour:
    """Return a behaviour that answers after ``release`` is set."""

    def behave(receiver: Receiver, connection: socket.socket, request: Received) -> None:
        release.wait(60)
        answer()(receiver, connection, request)

    return behave


def close(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def garbage(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    connection.shutdown(socket.SHUT_RDWR)


def drip_header(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    _drip(receiver, connection, b"HTTP/1.1 200 OK\r\nX-Slow: ")


def drip_body(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    _drip(receiver, connection, b"")


def _drip(receiver: Receiver, connection: socket.socket, start: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(start)
        while not receiver.stopped.wait(0.02):
            connection.sendall(b"a")


def endless_body(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not receiver.stopped.is_set():
            connection.sendall(b"a" * 65536)
            receiver.sent += 65536


def break_off(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\npartial")
    connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Receiver:
    """Each request uses the next of ``behaviours``. The last one is repeated."""

    behaviours: list[Behaviour] = field(default_factory=lambda: [answer()])
    requests: list[Received] = field(default_factory=list)
    arrivals: SimpleQueue[Received] = field(default_factory=SimpleQueue)
    connections: int = 0
    under_way: int = 0
    most_under_way: int = 0
    sent: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(READ_TIMEOUT_SECONDS)
            with self._lock:
                self.connections += 1
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
                while (request := _read(stream)) is not None:
                    self._behave(connection, request)
        finally:
            with self._lock:
                self._open.discard(connection)

    def _behave(self, connection: socket.socket, request: Received) -> None:
        with self._lock:
            self.requests.append(request)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        self.arrivals.put(request)
        try:
            behaviour(self, connection, request)
        finally:
            with self._lock:
                self.under_way -= 1


def _read(stream: Any) -> Received | None:
    first = stream.readline()
    if not first:
        return None
    method, path, _ = first.decode("latin-1").split(" ", 2)
    headers = []
    while (line := stream.readline().decode("latin-1").rstrip("\r\n")) != "":
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    length = int(next((value for name, value in headers if name.lower() == "content-length"), 0))
    return Received(method, path, headers, stream.read(length))


@contextlib.contextmanager
def receiving(*behaviours: Behaviour) -> Iterator[Receiver]:
    receiver = Receiver(list(behaviours) or [answer()])
    try:
        yield receiver
    finally:
        receiver.stop()
