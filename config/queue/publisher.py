"""One thread per process that sends the nudges, wake-ups and metrics of all threads.

Callers never wait for the broker or for Redis. Each kind of message is a ``Source``. The first item of an idle source
is sent at once. Items that arrive within the source's interval after that are sent together (docs/decisions/0010).
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from config.redis import PAUSE_SECONDS
from config.telemetry.metrics import reporter

# The time limit for the last items when the process ends.
FLUSH_SECONDS = 5.0


@dataclass(eq=False)
class Source:
    """One kind of message. The thread calls ``send`` with the items in the order of ``Publisher.put``.

    After an exception of ``send``, which ``failed`` gets, items are dropped for PAUSE_SECONDS, so that a server that
    does not respond causes few time-outs. Therefore items must be of a kind that may be lost.
    """

    send: Callable[[list[Any]], object]
    interval_seconds: float
    failed: Callable[[Exception], None] = field(default=lambda error: None)
    next_at: float = 0.0
    paused_until: float = 0.0

    def deliver(self, items: list[Any]) -> None:
        if time.monotonic() >= self.paused_until:
            try:
                self.send(items)
            except Exception as error:
                self.paused_until = time.monotonic() + PAUSE_SECONDS
                self.failed(error)
        self.next_at = time.monotonic() + self.interval_seconds


class Publisher:
    """A queue and its thread. The first item starts the thread, also in a forked process, which has no thread yet."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[Source | None, Any]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.pid = 0

    def put(self, source: Source | None, item: Any) -> None:
        self.items.put((source, item))
        if self.pid != os.getpid():
            with self.lock:
                if self.pid != os.getpid():
                    self.pid = os.getpid()
                    threading.Thread(target=self.run, name="publisher", daemon=True).start()

    def flush(self, timeout: float) -> bool:
        """Wait until all earlier items are sent or dropped. Returns False after ``timeout`` seconds."""
        done = threading.Event()
        self.put(None, done)
        return done.wait(timeout)

    def run(self) -> None:
        waiting: dict[Source, list[Any]] = {}
        while True:
            flushes = self.gather(waiting)
            now = time.monotonic()
            for source in list(waiting):
                if flushes or source.next_at <= now:
                    source.deliver(waiting.pop(source))
            for done in flushes:
                done.set()

    def gather(self, waiting: dict[Source, list[Any]]) -> list[threading.Event]:
        """Wait until a source is due or an item arrives. Returns the events of the threads that wait for a flush."""
        flushes: list[threading.Event] = []
        due = min((source.next_at for source in waiting), default=None)
        try:
            taken = self.items.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            while True:
                source, item = taken
                if source is None:
                    flushes.append(item)
                else:
                    waiting.setdefault(source, []).append(item)
                taken = self.items.get_nowait()
        except queue.Empty:
            return flushes


publisher = Publisher()
metrics_source = Source(lambda items: reporter.report(), settings.METRICS_FLUSH_SECONDS)
reporter.request = lambda: publisher.put(metrics_source, None)


@atexit.register
def flush() -> None:
    if publisher.pid == os.getpid():
        publisher.flush(FLUSH_SECONDS)
