"""``python -m benchmarks.receiver PORT``: a webhook receiver that uses little CPU.

``/instant`` responds at once, ``/slow`` after 50 ms, ``/hang`` never. ``/timed`` responds at once and prints the time
and the event's id.
"""

import asyncio
import sys
import time

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SLOW_SECONDS = 0.05


class Receiver(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.received = b""

    def data_received(self, data: bytes) -> None:
        """Handle one request. The client sends no second request before the response."""
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) < int(length.partition(b":")[2]):
            return
        self.received = b""
        path = head.split(b" ", 2)[1].partition(b"?")[0]
        if path == b"/timed":
            name = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"webhook-id:"))
            print(time.time(), name.partition(b":")[2].strip().decode(), flush=True)
        if path in (b"/instant", b"/timed"):
            self.transport.write(ANSWER)
        elif path == b"/slow":
            asyncio.get_running_loop().call_later(SLOW_SECONDS, self.transport.write, ANSWER)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
