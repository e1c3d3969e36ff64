"""A model provider for fault tests: it counts its requests, can hold them, and fails a share of them.

It is a thread of the test process and speaks chat completions. ``PROVIDER`` are the rows of its provider and model.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

PROVIDER = """
from runs.models import AgentModel, Provider
provider = Provider.objects.create(name="{name}", kind="openai", base_url="{url}", **{limits})
AgentModel.objects.create(
    name="{name}", display_name="Counted", provider=provider, provider_model="m", price_in=500_000,
    price_out=1_500_000, max_output_tokens=1000, is_default={default},
)
"""
FRAMES = [
    {"choices": [{"index": 0, "delta": {"content": "counted"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5}},
]
BODY = b"".join(b"data: %s\n\n" % json.dumps(frame).encode() for frame in FRAMES) + b"data: [DONE]\n\n"
RATE_LIMITED = b'{"error": {"message": "slow down", "type": "rate_limit_error"}}'


class CountingProvider:
    """``begun`` are the times and last messages of the requests; ``gate`` holds them while it is closed."""

    def __init__(self, seconds: float = 0.0, failing: float = 0.0) -> None:
        self.seconds, self.failing = seconds, failing
        self.begun: list[tuple[float, str]] = []
        self.failures = self.at_work = self.most_at_work = 0
        self.url = ""
        self.random = random.Random(4711)
        self.open = threading.Event()
        self.open.set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()

    @property
    def messages(self) -> list[str]:
        return [message for _, message in self.begun]

    def close_gate(self) -> None:
        self.open.clear()

    def open_gate(self) -> None:
        self.open.set()

    def run(self) -> None:
        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            self._ready.set()

        self._loop.create_task(main())
        self._loop.run_forever()

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.begun.append((time.monotonic(), body["messages"][-1]["content"]))
                self.at_work += 1
                self.most_at_work = max(self.most_at_work, self.at_work)
                try:
                    if not await self._answer(reader, writer):
                        return
                finally:
                    self.at_work -= 1
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        await asyncio.sleep(self.seconds)
        while not self.open.is_set():
            if reader.at_eof():
                return False
            await asyncio.sleep(0.01)
        if self.random.random() < self.failing:
            self.failures += 1
            if self.failures % 2:
                reset(writer)
                return False
            writer.write(answer(b"429 Too Many Requests", b"application/json", RATE_LIMITED))
        else:
            writer.write(answer(b"200 OK", b"text/event-stream", BODY))
        await writer.drain()
        return True


def answer(status: bytes, content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, content_type, len(body))
    return head + body


def reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with a RST."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def counting(seconds: float = 0.0, failing: float = 0.0) -> Iterator[CountingProvider]:
    provider = CountingProvider(seconds, failing)
    provider.start()
    try:
        yield provider
    finally:
        provider.stop()


def rows(provider: CountingProvider, *, name: str = "counted", default: bool = False, **limits: int) -> str:
    """For ``Stack(prepare=…)``. ``name`` is that of provider and model. As the default it replaces ``demo``."""
    drop = "AgentModel.objects.filter(is_default=True).update(is_default=False)\n" if default else ""
    code = PROVIDER.format(name=name, url=provider.url, limits=limits, default=default)
    return code.replace("provider =", drop + "provider =", 1)
