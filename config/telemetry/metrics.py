"""Metrics of this process, and their sums over all processes in Redis.

Web, stream and worker processes on any number of machines count in memory. The publisher thread of each process
(``config.queue.publisher``) adds the counts to Redis. ``config.api.metrics_page`` shows the sums (docs/decisions/0004).
Counting never raises, does not use the network and takes about a microsecond. A label must have a fixed set of values,
which clients cannot extend. The apps declare their own metrics.
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
from typing import TYPE_CHECKING, Any

from config.redis import client as redis_client
from config.redis import failures as redis_failures

if TYPE_CHECKING:
    import redis

logger = logging.getLogger(__name__)

PREFIX = "agents_"
# Hashes in Redis: sums and latest values by metric and labels, and the values of each process with their time.
SUMS, LATEST, PROCESSES = "metrics:sums", "metrics:latest", "metrics:processes"
SEPARATOR = "\t"
BUCKET, TOTAL = "le", "sum"
# A process without a report for this time is treated as ended.
PROCESS_SECONDS = 60.0

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

Key = tuple[str, ...]


class Recorder:
    """The counts of this process since its last flush."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums: dict[Key, float] = {}
        self.latest: dict[Key, float] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.pid = 0
        self.flush_requested = False
        # Called for the first value after each flush. ``config.queue.publisher`` sets it.
        self.request_flush: Callable[[], None] = lambda: None

    def add(self, *amounts: tuple[Key, float]) -> None:
        with self.lock:
            self._request_flush()
            for key, amount in amounts:
                self.sums[key] = self.sums.get(key, 0.0) + amount

    def put(self, key: Key, value: float) -> None:
        with self.lock:
            self._request_flush()
            self.latest[key] = value

    def watch(self, name: str, value: Callable[[], float]) -> None:
        with self.lock:
            self._request_flush()
            self.gauges[name] = value

    def flush(self) -> bool:
        """Add the counts to the sums in Redis. Returns False if Redis failed; the next flush then sends the counts."""
        with self.lock:
            self.flush_requested = False
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
        except redis_failures() as error:
            with self.lock:
                for key, amount in sums.items():
                    self.sums[key] = self.sums.get(key, 0.0) + amount
                self.latest = latest | self.latest
            logger.debug("metrics are kept until Redis is available (%s)", type(error).__name__)
            return False
        finally:
            with self.lock:
                if self.sums or self.latest or self.gauges:  # gauges also report that this process is alive
                    self._request_flush()
        return True

    def _request_flush(self) -> None:
        """Request a flush for the first value since the last flush. The caller holds the lock."""
        if self.pid != os.getpid():
            if self.pid:  # after a fork, the parent process sends these counts
                self.sums, self.latest = {}, {}
            self.pid, self.flush_requested = os.getpid(), False
        if not self.flush_requested:
            self.flush_requested = True
            self.request_flush()


recorder = Recorder()


class Metric:
    """A named metric with labels, created once at the import of a module and registered in ``declared``."""

    kind = ""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = PREFIX + name, help, tuple(labels)
        declared[self.name] = self


declared: dict[str, Metric] = {}


class Counter(Metric):
    """A value that only grows. The metrics page appends ``_total`` to its name."""

    kind = "counter"

    def inc(self, *labels: str, by: float = 1.0) -> None:
        recorder.add(((self.name, *labels), by))


class Histogram(Metric):
    """Counts of values in buckets. ``bounds`` are the upper bounds of the buckets."""

    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), bounds: tuple[float, ...] = SECONDS) -> None:
        super().__init__(name, help, labels)
        self.bounds = bounds
        self.names = [*(repr(bound) for bound in bounds), "+Inf"]

    def observe(self, value: float, *labels: str) -> None:
        bucket = self.names[bisect_left(self.bounds, value)]
        recorder.add(((self.name, *labels, BUCKET, bucket), 1.0), ((self.name, *labels, TOTAL), value))


class Latest(Metric):
    """The value that was set last, by any process."""

    kind = "latest"

    def set(self, value: float, *labels: str) -> None:
        recorder.put((self.name, *labels), value)


class PerProcess(Metric):
    """A value that each process reads at its flush. The page shows the sum over the live processes."""

    kind = "process"

    def follow(self, value: Callable[[], float], *labels: str) -> None:
        recorder.watch(SEPARATOR.join((self.name, *labels)), value)


@dataclass(frozen=True)
class Gauge:
    """Values by their labels, read for each request of the metrics page. ``name`` is without the prefix."""

    name: str
    help: str
    values: dict[Any, float]
    labels: Sequence[str] = ()


def redis_time(client: redis.Redis) -> float:
    """Redis' time in seconds since the epoch. It decides which processes are alive; their own clocks do not matter."""
    seconds, microseconds = client.time()
    return float(seconds) + microseconds / 1e6


def process_values(rows: dict[str, str], now: float) -> tuple[dict[str, float], list[str]]:
    """The sums over the live processes, and the names of the ended processes."""
    sums: dict[str, float] = {}
    ended = []
    for process, body in rows.items():
        report: dict[str, Any] = json.loads(body)
        if now - report["at"] > PROCESS_SECONDS:
            ended.append(process)
            continue
        for name, value in report["values"].items():
            sums[name] = sums.get(name, 0.0) + value
    return sums, ended
