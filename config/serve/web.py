"""The web server's worker: gunicorn's threads, whose answer to what is not HTTP is the API's error envelope.

Such a request never reaches Django, so its answer is made here.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from importlib import import_module
from typing import Any

from gunicorn import glogging, util
from gunicorn.http import message
from gunicorn.workers import gthread

from config import settings
from config.serve import garbage

# Any id in a path is an id that doesn't exist, however long: 404, not a refusal by the server, whose own setting ends
# at 8 KiB.
REQUEST_LINE_MAX_BYTES = 64 * 1024
CODES = {413: "PAYLOAD_TOO_LARGE", 500: "INTERNAL_ERROR"}
MESSAGES = {
    414: "The request line is too long.",
    431: "The request's headers are too large.",
    500: "Something went wrong on our side.",
    501: "The transfer coding is not supported.",
}


def write_envelope(sock: socket.socket, status: int, reason: str, _details: str) -> None:
    """Answer with the error envelope; the parser's own message may quote the request, so it is left out."""
    message = MESSAGES.get(status, "The request is not valid HTTP.")
    body = json.dumps({"error": {"code": CODES.get(status, "VALIDATION_ERROR"), "message": message}}).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"X-Content-Type-Options: nosniff\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    util.write_nonblock(sock, head.encode("latin1") + body)


class Logger(glogging.Logger):
    def access(self, *args: Any) -> None:
        """Nothing, unless somebody asked for it: gunicorn gathers a line's parts all the same, for its log might be set
        up in ``logconfig_dict``, where ours is not.
        """
        if self.cfg.accesslog or self.cfg.syslog:
            super().access(*args)


class RequestSocket(socket.socket):
    """While a thread reads a request, whoever sends too slowly counts as gone: each would keep one of the few threads.

    The time is WEB_READ_SECONDS and a second more for each WEB_READ_BYTES_PER_SECOND that came.
    """

    read_by = float("inf")

    def expect_request(self) -> None:
        self.read_by = time.monotonic() + settings.WEB_READ_SECONDS

    def recv(self, *args: Any) -> bytes:
        usual = self.gettimeout()
        if usual == 0:  # in the hands of an event loop
            return super().recv(*args)
        left = self.read_by - time.monotonic()
        if left <= 0:
            return b""
        self.settimeout(min(left, threading.TIMEOUT_MAX) if usual is None else min(left, usual))
        try:
            received = super().recv(*args)
        except TimeoutError:
            if usual is not None:
                raise
            return b""
        finally:
            self.settimeout(usual)
        self.read_by += len(received) / settings.WEB_READ_BYTES_PER_SECOND
        return received


class Connection(gthread.TConn):
    def __init__(self, cfg: Any, sock: socket.socket, client: Any, server: Any) -> None:
        super().__init__(cfg, RequestSocket(fileno=sock.detach()), client, server)

    def wait_for_data(self, timeout: float) -> bool:
        """Not at all: a client that says nothing yet waits in the poller, not with one of the few threads."""
        return bool(super().wait_for_data(0.0))


class Worker(gthread.ThreadWorker):
    def load_wsgi(self) -> None:
        super().load_wsgi()
        # By name: it can be imported only now that the application is loaded.
        streams = import_module(settings.STREAM_SERVERS)
        self.wsgi: Any = streams.hand_over_streams(self.wsgi)
        self.handed_over = streams.HandedOver
        garbage.spare_what_is_loaded()

    def handle(self, conn: Any) -> Any:
        if isinstance(conn.sock, RequestSocket):  # not so with TLS of gunicorn's own
            conn.sock.expect_request()
        return super().handle(conn)

    def handle_request(self, req: Any, conn: Any) -> Any:
        """A run's stream takes the connection along to a thread that holds them all; this one is free again."""
        try:
            return super().handle_request(req, conn)
        except self.handed_over:
            # Its own way to close would shut the connection down for both.
            conn.close = lambda graceful=False: util.close(conn.sock)
            return False

    def init_process(self) -> Any:
        # gunicorn has no setting for any of these.
        gthread.TConn = Connection
        util.write_error = write_envelope
        message.MAX_REQUEST_LINE = REQUEST_LINE_MAX_BYTES
        return super().init_process()
