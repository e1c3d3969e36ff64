"""Telling the processes that hold streams open which runs have new events: one small message in Redis, after commit.

A message says "look now" and may be lost: whoever holds streams also looks by itself now and then. Nothing here raises,
and no database thread waits for Redis: a thread of its own publishes what has gathered meanwhile in one message.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from urllib.parse import urlsplit

import redis
from django.conf import settings
from django.db import transaction

from config.redis import client

logger = logging.getLogger(__name__)

# After a failure nothing is published for so long; a stalled Redis then costs a time-out now and then, to this thread.
PAUSE_SECONDS = 2.0
# What happens in so short a time goes in one message; while nobody listens to any, a longer time will do.
GATHER_SECONDS = 0.01
UNHEARD_GATHER_SECONDS = 0.1


def channel(url: str) -> str:
    """Messages reach all databases of a server, so the channel's name tells services that share one apart."""
    return f"run-events:{urlsplit(url).path.strip('/')}"


def after_commit(*run_ids: str) -> None:
    """Announce new events of these runs once the surrounding transaction is committed."""
    transaction.on_commit(lambda: publisher.announce(run_ids), robust=True)


class Publisher:
    """One a process; its thread starts with the first announcement."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.pid = 0

    def announce(self, run_ids: tuple[str, ...]) -> None:
        self.waiting.put(run_ids)
        if self.pid != os.getpid():
            self.start()

    def start(self) -> None:
        with self.lock:
            if self.pid != os.getpid():  # a fork takes the queue along, but not the thread
                self.pid = os.getpid()
                threading.Thread(target=self.run, name="run-wakeups", daemon=True).start()

    def run(self) -> None:
        connection: redis.Redis | None = None
        paused_until, listeners = 0.0, 0
        while True:
            run_ids = set(self.waiting.get())
            time.sleep(GATHER_SECONDS if listeners else UNHEARD_GATHER_SECONDS)
            while not self.waiting.empty():
                run_ids.update(self.waiting.get())
            if time.monotonic() < paused_until:
                continue
            try:
                connection = connection or client(reconnect=True)
                name = channel(settings.CACHE_REDIS_URL)
                listeners = int(connection.publish(name, " ".join(run_ids)))
            except Exception as error:
                paused_until = time.monotonic() + PAUSE_SECONDS
                logger.info("no wake-ups for streams for %g s (%s)", PAUSE_SECONDS, type(error).__name__)


publisher = Publisher()
