"""A local S3-compatible server in a separate process."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "files"


@contextmanager
def object_storage() -> Iterator[str]:
    """Run the server. Yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "the object storage did not start"
                assert time.monotonic() < end, "the object storage did not start in time"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
