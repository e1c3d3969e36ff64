"""The threads that send nudges, wake-ups and metrics, so that no caller waits for Redis (docs/decisions/0010). A nudge
is a task message with ids at which a worker is to look now. A lost one only delays work, which a sweep finds.
"""

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import transaction

from config import redis
from config.telemetry import tracing
from config.telemetry.metrics import Counter, report

logger = logging.getLogger(__name__)

unsent = Counter("nudges_failed", "Messages that the broker did not take; sweeps find what they announced.")

# A single nudge is sent at once. Further nudges after it wait and are sent in one message: the wait is this time for
# each nudge of the last message, up to a limit. So few nudges hardly wait, and many need few messages.
GATHER_SECONDS_PER_NUDGE = 0.005
GATHER_SECONDS = 0.02
MESSAGE_MAX_IDS = 8  # few enough that several workers share a burst evenly
FLUSH_SECONDS = 5.0  # the time limit for the last items when the process ends
# Seconds between two wake-ups. The second value applies while no process listens.
WAKE_SECONDS, IDLE_WAKE_SECONDS = 0.01, 0.1


class Source:
    """One kind of message, and the thread that calls ``send`` with its items in the order of ``put``. An idle source
    sends its first item at once, and the items of the interval after it together. After an exception, which ``failed``
    gets, items are dropped for PAUSE_SECONDS, so that a server that does not respond causes few time-outs. So an item
    must be of a kind that may be lost.
    """

    def __init__(
        self, send: Callable[[list[Any]], object], seconds: float, failed: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self.send, self.interval_seconds, self.failed = send, seconds, failed
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


@dataclass(frozen=True, slots=True)
class Nudge:
    task: str
    ids: tuple[str, ...]
    countdown: float | None
    context: Context  # the caller's, because the message contains its request id and trace


def send_nudges(items: list[Nudge]) -> None:
    # The web processes have imported Celery. Most commands of manage.py send nothing and do without it.
    from config.celery import app

    publish = partial(app.send_task, retry=False, ignore_result=True)
    for item in grouped(items):
        item.context.run(publish, item.task, args=item.ids, countdown=item.countdown)
    nudges.interval_seconds = min(GATHER_SECONDS, len(items) * GATHER_SECONDS_PER_NUDGE)


def nudges_failed(error: Exception) -> None:
    unsent.inc()
    logger.warning("the broker did not accept a message (%s); the sweep will find the due work", type(error).__name__)


nudges = Source(send_nudges, GATHER_SECONDS_PER_NUDGE, nudges_failed)


def grouped(items: Iterable[Nudge]) -> Iterator[Nudge]:
    """Merge nudges of one task into few messages. A nudge within a trace is not merged: a message has one trace."""
    found: dict[object, list[Nudge]] = {}
    for item in items:
        key = object() if item.context.run(tracing.current) else (item.task, item.countdown)
        found.setdefault(key, []).append(item)
    for same in found.values():
        ids = tuple(dict.fromkeys(name for item in same for name in item.ids))
        for start in range(0, len(ids) or 1, MESSAGE_MAX_IDS):
            yield replace(same[0], ids=ids[start : start + MESSAGE_MAX_IDS])


def nudge(task: str, *ids: str, countdown: float | None = None) -> None:
    """Publish ``task`` soon, or after ``countdown`` seconds, with these and other ids. Never blocks or raises."""
    nudges.put(Nudge(task, ids, countdown, copy_context()))


def nudge_after_commit(task: str, *ids: str, countdown: float | None = None) -> None:
    """Like ``nudge``, after the commit of the current transaction, or at once without a transaction."""
    transaction.on_commit(lambda: nudge(task, *ids, countdown=countdown), robust=True)


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
