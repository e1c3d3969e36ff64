"""Metrics of this process, and their way to the one place where those of all processes are summed: a hash in Redis.

Web, stream and worker processes on any number of machines count in memory. The queue's publisher thread of each process
adds what was counted to Redis; ``config.api.metrics_page`` shows the sums (docs/decisions/0004). Counting never raises,
waits for no network and costs about a microsecond. Label values must come from a set that callers cannot enlarge.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from config.redis import client as redis_client

logger = logging.getLogger(__name__)

PREFIX = "agents_"
# Hashes in Redis: sums by field, newest values by field, and the values of each process with their time.
SUMS, LATEST, PROCESSES = "metrics:sums", "metrics:latest", "metrics:processes"
SEPARATOR = "\t"
BUCKET, TOTAL = "le", "sum"
# A process that has not reported for this time counts as ended.
PROCESS_SECONDS = 60.0

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

Key = tuple[str, ...]


class Recorder:
    """What this process counted since its last flush."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums: dict[Key, float] = {}
        self.latest: dict[Key, float] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.pid = 0
        self.asked = False
        # Called once there is something to flush, and again only after a flush. The queue's publisher sets it.
        self.ask: Callable[[], None] = lambda: None

    def add(self, *amounts: tuple[Key, float]) -> None:
        with self.lock:
            self._ask()
            for key, amount in amounts:
                self.sums[key] = self.sums.get(key, 0.0) + amount

    def put(self, key: Key, value: float) -> None:
        with self.lock:
            self._ask()
            self.latest[key] = value

    def watch(self, name: str, value: Callable[[], float]) -> None:
        with self.lock:
            self._ask()
            self.gauges[name] = value

    def flush(self) -> bool:
        """Add what was counted to the sums. False if Redis did not take it; it is kept for the next flush."""
        with self.lock:
            self.asked = False
            sums, self.sums = self.sums, {}
            latest, self.latest = self.latest, {}
        try:
            with redis_client(decode_responses=True) as client, client.pipeline(transaction=True) as pipeline:
                for key, amount in sums.items():
                    pipeline.hincrbyfloat(SUMS, SEPARATOR.join(key), amount)
                for key, value in latest.items():
                    pipeline.hset(LATEST, SEPARATOR.join(key), value)
                if self.gauges:
                    values = {name: value() for name, value in self.gauges.items()}
                    body = json.dumps({"at": redis_time(client), "values": values})
                    pipeline.hset(PROCESSES, f"{socket.gethostname()}:{os.getpid()}", body)
                pipeline.execute()
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: not an address
            with self.lock:
                for key, amount in sums.items():
                    self.sums[key] = self.sums.get(key, 0.0) + amount
                self.latest = latest | self.latest
            logger.debug("metrics wait for Redis (%s)", type(error).__name__)
            return False
        finally:
            with self.lock:
                if self.sums or self.latest or self.gauges:  # gauges also say that this process is alive
                    self._ask()
        return True

    def _ask(self) -> None:
        """Under the lock: have the first value since the last flush sent."""
        if self.pid != os.getpid():
            if self.pid:  # the parent of a fork sends its own metrics itself
                self.sums, self.latest = {}, {}
            self.pid, self.asked = os.getpid(), False
        if not self.asked:
            self.asked = True
            self.ask()


recorder = Recorder()


class Metric:
    """A named figure with labels. Made once, at a module's import, and known to ``declared`` from then on."""

    kind = ""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = PREFIX + name, help, tuple(labels)
        declared[self.name] = self


declared: dict[str, Metric] = {}


class Counter(Metric):
    """Grows. By convention its name lacks the ``_total`` that the page adds."""

    kind = "counter"

    def inc(self, *labels: str, by: float = 1.0) -> None:
        recorder.add(((self.name, *labels), by))


class Histogram(Metric):
    """How often values fell where; ``bounds`` are upper ones."""

    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), bounds: tuple[float, ...] = SECONDS) -> None:
        super().__init__(name, help, labels)
        self.bounds = bounds
        self.names = [*(repr(bound) for bound in bounds), "+Inf"]

    def observe(self, value: float, *labels: str) -> None:
        bucket = self.names[bisect_left(self.bounds, value)]
        recorder.add(((self.name, *labels, BUCKET, bucket), 1.0), ((self.name, *labels, TOTAL), value))


class Latest(Metric):
    """The value that any process set last."""

    kind = "latest"

    def set(self, value: float, *labels: str) -> None:
        recorder.put((self.name, *labels), value)


class PerProcess(Metric):
    """What each process that has such a thing says now; the page shows the sum over those that are alive."""

    kind = "process"

    def follow(self, value: Callable[[], float]) -> None:
        recorder.watch(self.name, value)


@dataclass(frozen=True)
class Gauge:
    """A value that is read when the page is asked for: label values → value. ``name`` is without the prefix."""

    name: str
    help: str
    values: dict[Any, float]
    labels: Sequence[str] = ()


def redis_time(client: redis.Redis) -> float:
    """The one clock by which processes are found to be alive."""
    seconds, microseconds = client.time()
    return float(seconds) + microseconds / 1e6


def process_values(rows: dict[str, str], now: float) -> tuple[dict[str, float], list[str]]:
    """The sums over living processes, and the names of those that are no more."""
    sums: dict[str, float] = {}
    gone = []
    for process, body in rows.items():
        report: dict[str, Any] = json.loads(body)
        if now - report["at"] > PROCESS_SECONDS:
            gone.append(process)
            continue
        for name, value in report["values"].items():
            sums[name] = sums.get(name, 0.0) + value
    return sums, gone
