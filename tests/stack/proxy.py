"""A TCP proxy that can fall silent: it keeps the connections open, accepts new ones, and forwards nothing."""

import contextlib
import socket
import threading
from typing import Self


class Proxy:
    """``with Proxy(host, port) as proxy:`` forwards each connection to ``proxy.port`` of the loopback interface.

    What arrives during the silence is lost, so connections of that time work never again.
    """

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.silent = False
        self.sockets: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self.listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # A shutdown wakes the threads that wait for the sockets.
        for each in [self.listener, *self.sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.sockets.append(client)
                if not self.silent:
                    server = socket.create_connection(self.target)
                    self.sockets.append(server)
                    for ends in ((client, server), (server, client)):
                        threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        """Pass on what arrives, and the end of the connection. Both are lost during the silence."""
        lost = False
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                lost = lost or self.silent
                if not lost:
                    target.sendall(received)
        if not (lost or self.silent):
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
