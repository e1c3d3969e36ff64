"""The threads that send nudges, wake-ups and metrics, so that no caller waits for Redis (docs/decisions/0010)."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import transaction

from config import redis
from config.telemetry.metrics import report

# The time limit for the last items when the process ends.
FLUSH_SECONDS = 5.0
# Seconds between two wake-ups. The second value applies while no process listens.
WAKE_SECONDS, IDLE_WAKE_SECONDS = 0.01, 0.1


class Source:
    """One kind of message, and the thread that calls ``send`` with its items in the order of ``put``. An idle source
    sends its first item at once, and the items of the interval after it together.

    ``failed`` gets an exception of ``send``. Items are then dropped for PAUSE_SECONDS, so that a server that does not
    respond causes few time-outs. Therefore items must be of a kind that may be lost.
    """

    def __init__(
        self,
        send: Callable[[list[Any]], object],
        interval_seconds: float,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.send, self.interval_seconds, self.failed = send, interval_seconds, failed
        self.paused_until = 0.0
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.flushing = threading.Event()
        self.lock = threading.Lock()
        self.pid = 0
        sources.append(self)

    def put(self, item: Any) -> None:
        """The first item starts the thread, also in a forked process, which has no thread yet."""
        self.items.put(item)
        if self.pid != os.getpid():
            with self.lock:
                if self.pid != os.getpid():
                    self.pid = os.getpid()
                    threading.Thread(target=self.run, name="publisher", daemon=True).start()

    def flush(self, timeout: float) -> bool:
        """Wait until all earlier items are sent or dropped. Returns False after ``timeout`` seconds."""
        done = threading.Event()
        self.put(done)
        self.flushing.set()
        return done.wait(timeout)

    def run(self) -> None:
        while True:
            taken = [self.items.get()]
            while not self.items.empty():  # only this thread takes items
                taken.append(self.items.get())
            flushes = [item for item in taken if isinstance(item, threading.Event)]
            if len(taken) > len(flushes):
                self.deliver([item for item in taken if item not in flushes])
            for done in flushes:
                done.set()
            self.flushing.wait(self.interval_seconds)
            self.flushing.clear()

    def deliver(self, items: list[Any]) -> None:
        if time.monotonic() >= self.paused_until:
            try:
                self.send(items)
            except Exception as error:
                self.paused_until = time.monotonic() + redis.PAUSE_SECONDS
                self.failed(error)


sources: list[Source] = []


def wake_channel(url: str) -> str:
    """The channel of this service, with its database number: a message of Redis reaches all databases of a server."""
    return f"run-events:{urlsplit(url).path.strip('/')}"


def wake_after_commit(*run_ids: str) -> None:
    """Name runs with new events, after the commit, to processes with open streams, which also query."""
    transaction.on_commit(lambda: wakeups.put(run_ids), robust=True)


def _wake(items: list[tuple[str, ...]]) -> None:
    run_ids = {run_id for item in items for run_id in item}
    channel = wake_channel(settings.CACHE_REDIS_URL)
    listeners = redis.ask(lambda client: client.publish(channel, " ".join(run_ids)))
    wakeups.interval_seconds = WAKE_SECONDS if listeners else IDLE_WAKE_SECONDS


wakeups = Source(_wake, IDLE_WAKE_SECONDS)


def _report(items: list[Any]) -> None:
    metrics.put(None)  # the next report
    report()


# The first item begins the reports of this process.
metrics = Source(_report, settings.METRICS_FLUSH_SECONDS)


@atexit.register
def flush() -> None:
    end = time.monotonic() + FLUSH_SECONDS
    for source in sources:
        if source.pid == os.getpid():
            source.flush(max(0.0, end - time.monotonic()))
