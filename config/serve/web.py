"""The worker class of the web server: gunicorn's threads, with a time limit for each request and with the API's error
envelope as the response to invalid HTTP, which never reaches Django.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from config.outbound.loop import shared
from config.serve import garbage

# A very long id in a path must get 404 from Django. gunicorn's setting allows at most 8 KiB.
REQUEST_LINE_MAX_BYTES = 64 * 1024
# How long a thread reads the rest of a refused request's body, so that the connection can serve another request.
DRAIN_SECONDS = 0.2
# How long a closed connection waits for the client's end.
CLOSE_SECONDS = 2.0
CODES = {413: "PAYLOAD_TOO_LARGE", 500: "INTERNAL_ERROR"}
MESSAGES = {
    414: "The request line is too long.",
    431: "The request's headers are too large.",
    500: "Something went wrong on our side.",
    501: "The transfer coding is not supported.",
}


def write_envelope(sock: socket.socket, status: int, reason: str, _details: str) -> None:
    """Respond with the error envelope, without the parser's message, which can quote the request."""
    message = MESSAGES.get(status, "The request is not valid HTTP.")
    body = json.dumps({"error": {"code": CODES.get(status, "VALIDATION_ERROR"), "message": message}}).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"X-Content-Type-Options: nosniff\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    util.write_nonblock(sock, head.encode("latin1") + body)


class Logger(glogging.Logger):
    def access(self, *args: Any) -> None:
        """Skip the access log unless it is configured.

        gunicorn formats each line even without an access log, because ``logconfig_dict`` could configure one.
        """
        if self.cfg.accesslog or self.cfg.syslog:
            super().access(*args)


class RequestSocket(socket.socket):
    """A socket that reports the end of the connection if a client sends its request too slowly.

    Each slow client would occupy one of the few threads. The limit is WEB_READ_SECONDS plus one second for each
    WEB_READ_BYTES_PER_SECOND bytes that arrived.
    """

    read_deadline = float("inf")

    def start_read_deadline(self) -> None:
        self.read_deadline = time.monotonic() + settings.WEB_READ_SECONDS

    def recv(self, *args: Any) -> bytes:
        socket_timeout = self.gettimeout()
        if socket_timeout == 0:  # an event loop uses it
            return super().recv(*args)
        left = self.read_deadline - time.monotonic()
        if left <= 0:
            return b""
        self.settimeout(min(left, threading.TIMEOUT_MAX) if socket_timeout is None else min(left, socket_timeout))
        try:
            received = super().recv(*args)
        except TimeoutError:
            if socket_timeout is not None:
                raise
            return b""
        finally:
            self.settimeout(socket_timeout)
        self.read_deadline += len(received) / settings.WEB_READ_BYTES_PER_SECOND
        return received


class Connection(gthread.TConn):
    def __init__(self, cfg: Any, sock: socket.socket, client: Any, server: Any) -> None:
        super().__init__(cfg, RequestSocket(fileno=sock.detach()), client, server)

    def close(self, graceful: bool = False) -> None:
        """Leave the wait for the client's end to an event loop: gunicorn's main thread would wait, and with it all
        requests of the process.
        """
        if graceful and isinstance(self.sock, RequestSocket):
            shared.submit(close_after_client(self.sock))
        else:
            super().close(graceful)

    def wait_for_data(self, timeout: float) -> bool:
        """Do not wait: a connection without data waits in the poller and does not occupy a thread."""
        return bool(super().wait_for_data(0.0))


async def close_after_client(sock: socket.socket) -> None:
    """Close after the client has closed, so that it can read the whole response before a reset reaches it."""
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(CLOSE_SECONDS):
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass


class Worker(gthread.ThreadWorker):
    def load_wsgi(self) -> None:
        super().load_wsgi()
        # It can be imported only after the application is loaded.
        streams = import_module(settings.STREAM_SERVERS)
        self.wsgi: Any = streams.hand_over_streams(self.wsgi)
        self.handed_over = streams.HandedOver
        garbage.freeze_loaded_objects()

    def handle(self, conn: Any) -> Any:
        if isinstance(conn.sock, RequestSocket):  # gunicorn's TLS has a different class
            conn.sock.start_read_deadline()
        return super().handle(conn)

    def handle_request(self, req: Any, conn: Any) -> Any:
        """Serve a request. A run's stream moves its connection to the thread of all streams and frees this thread."""
        try:
            return super().handle_request(req, conn)
        except self.handed_over:
            # gunicorn's close would shut the connection down for the streams' thread also.
            conn.close = lambda graceful=False: util.close(conn.sock)
            return False

    def init_process(self) -> Any:
        # gunicorn has no setting for any of these.
        gthread.TConn = Connection
        gthread.DEFAULT_WORKER_DATA_TIMEOUT = DRAIN_SECONDS
        util.write_error = write_envelope
        message.MAX_REQUEST_LINE = REQUEST_LINE_MAX_BYTES
        return super().init_process()
