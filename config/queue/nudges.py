"""Nudges: task messages that only say "look now". Losing one costs time, never work, for a sweep finds what is due.

Nobody waits for the broker: a thread of its own publishes, and what is asked for while it is at it goes
together (docs/decisions/0010).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, replace

from celery import current_app
from django.db import transaction

from config.telemetry import tracing
from config.telemetry.metrics import Counter

logger = logging.getLogger(__name__)

unsent = Counter("nudges_failed", "Messages that the broker did not take; sweeps find what they told of.")

# After a failure this process publishes nothing for so long: a broker that stalls costs one time-out now and then.
PAUSE_SECONDS = 5.0
# The pause after a message. An idle process sends at once; a busy one sends a few ids at a time.
GATHER_SECONDS = 0.02
# Few enough that several workers share a burst evenly.
MESSAGE_MAX_IDS = 8
# At the process's end, for what was asked for last.
FLUSH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Nudge:
    task: str
    ids: tuple[str, ...]
    countdown: float | None
    # Of whoever asked: its request id and trace go along.
    context: Context


class Publisher:
    """One a process; its thread starts with the first nudge."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[Nudge | threading.Event] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.pid = 0
        self.paused_until = 0.0

    def put(self, item: Nudge | threading.Event) -> None:
        self.waiting.put(item)
        if self.pid != os.getpid():
            with self.lock:
                if self.pid != os.getpid():  # a fork takes the queue along, but not the thread
                    self.pid = os.getpid()
                    threading.Thread(target=self.run, name="nudges", daemon=True).start()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was asked for so far is published or given up."""
        done = threading.Event()
        self.put(done)
        return done.wait(timeout)

    def run(self) -> None:
        while True:
            items = [self.waiting.get()]
            while not self.waiting.empty():
                items.append(self.waiting.get())
            for nudge in together(item for item in items if isinstance(item, Nudge)):
                self.publish(nudge)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            time.sleep(GATHER_SECONDS)

    def publish(self, nudge: Nudge) -> None:
        if time.monotonic() < self.paused_until:
            return
        try:
            nudge.context.run(
                current_app.send_task,
                nudge.task,
                args=nudge.ids,
                countdown=nudge.countdown,
                retry=False,
                ignore_result=True,
            )
        except Exception as error:
            self.paused_until = time.monotonic() + PAUSE_SECONDS
            unsent.inc()
            logger.warning("the broker took no message (%s); the sweep will find what is due", type(error).__name__)


def together(nudges: Iterable[Nudge]) -> Iterator[Nudge]:
    """As few messages as say the same. Of those under a trace each goes by itself, for a message has one trace."""
    found: dict[object, list[Nudge]] = {}
    for nudge in nudges:
        key = object() if nudge.context.run(tracing.current) else (nudge.task, nudge.countdown)
        found.setdefault(key, []).append(nudge)
    for same in found.values():
        ids = tuple(dict.fromkeys(name for nudge in same for name in nudge.ids))
        for start in range(0, len(ids) or 1, MESSAGE_MAX_IDS):
            yield replace(same[0], ids=ids[start : start + MESSAGE_MAX_IDS])


publisher = Publisher()


def nudge(task: str, *ids: str, countdown: float | None = None) -> None:
    """Have ``task`` published soon, with these ids and maybe those of others. Waits for nothing and never raises."""
    publisher.put(Nudge(task, ids, countdown, copy_context()))


def nudge_after_commit(task: str, *ids: str, countdown: float | None = None) -> None:
    """As ``nudge``, once the surrounding transaction is committed; at once outside of one."""
    transaction.on_commit(lambda: nudge(task, *ids, countdown=countdown), robust=True)


@atexit.register
def flush() -> None:
    """Before the process ends: what was asked for is published or given up."""
    if publisher.pid == os.getpid():
        publisher.flush(FLUSH_SECONDS)
