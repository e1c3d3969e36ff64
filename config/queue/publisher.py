"""One thread per process that sends what the other threads ask for: nudges, wake-ups and metrics.

No caller waits for the broker or for Redis. Each kind of message is a ``Source``: the first item of an idle source is
sent at once, and what is asked for during the source's interval is sent together (docs/decisions/0010).
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

from config.telemetry.metrics import recorder

# At the end of the process, for what was asked for last.
FLUSH_SECONDS = 5.0


@dataclass(eq=False)
class Source:
    """One kind of message. ``send`` gets the items in the order in which they were asked for, on the thread.

    After ``send`` raised, items are dropped for ``pause_seconds``: a stalled server then costs one time-out now and
    then. A source therefore holds only what may be lost. ``failed`` is told of each exception.
    """

    send: Callable[[list[Any]], object]
    interval_seconds: float
    pause_seconds: float = 0.0
    failed: Callable[[Exception], None] = field(default=lambda error: None)
    next_at: float = 0.0
    paused_until: float = 0.0

    def deliver(self, items: list[Any]) -> None:
        if time.monotonic() >= self.paused_until:
            try:
                self.send(items)
            except Exception as error:
                self.paused_until = time.monotonic() + self.pause_seconds
                self.failed(error)
        self.next_at = time.monotonic() + self.interval_seconds


class Publisher:
    """The thread starts with the first item. After a fork the child has the queue, but needs a thread of its own."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[tuple[Source | None, Any]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.pid = 0

    def put(self, source: Source | None, item: Any) -> None:
        self.asked.put((source, item))
        if self.pid != os.getpid():
            with self.lock:
                if self.pid != os.getpid():
                    self.pid = os.getpid()
                    threading.Thread(target=self.run, name="publisher", daemon=True).start()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was asked for before is sent or dropped. False after ``timeout`` seconds."""
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
        """Wait until a source is due or something is asked for; return who waits for a flush."""
        flushes: list[threading.Event] = []
        due = min((source.next_at for source in waiting), default=None)
        try:
            taken = self.asked.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            while True:
                source, item = taken
                if source is None:
                    flushes.append(item)
                else:
                    waiting.setdefault(source, []).append(item)
                taken = self.asked.get_nowait()
        except queue.Empty:
            return flushes


publisher = Publisher()
# Not repeated at once when Redis is away: the recorder keeps what was not sent.
metrics_source = Source(lambda items: recorder.flush(), settings.METRICS_FLUSH_SECONDS)
recorder.ask = lambda: publisher.put(metrics_source, None)


@atexit.register
def flush() -> None:
    if publisher.pid == os.getpid():
        publisher.flush(FLUSH_SECONDS)
