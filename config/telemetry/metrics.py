"""Metrics of this process, and their way to the metrics page (docs/decisions/0004).

Web, stream and worker processes on any number of machines count in registries of prometheus_client. A publisher
thread of each process (``config.queue.publisher``) writes the registry's text to Redis, and ``config.api.metrics_page``
joins the texts. Counting does not use the network. A label must have a fixed set of values, which clients cannot
extend. The apps declare their own metrics.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
from django.conf import settings

from config.redis import client as redis_client
from config.redis import failures as redis_failures

logger = logging.getLogger(__name__)

PREFIX = "agents_"
# In Redis: the names of the processes, the text of each, and the latest values by metric and labels.
PROCESSES, TEXT, LATEST = "metrics:processes", "metrics:process:", "metrics:latest"
SEPARATOR = "\t"
# A process that sends no report for this time plus METRICS_FLUSH_SECONDS has ended.
PROCESS_SECONDS = 60

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

prometheus_client.disable_created_metrics()
registry = prometheus_client.CollectorRegistry()


def this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def own_text() -> str:
    """The registry's metrics as text, with the label ``process``: Prometheus must see when a counter begins again."""
    families, process = list(registry.collect()), {"process": this_process()}
    for family in families:
        family.samples = [one._replace(labels=one.labels | process) for one in family.samples]
    return exposition(families)


def exposition(families: Iterable[Any]) -> str:
    """The metrics in the text format."""
    shown: Any = SimpleNamespace(collect=lambda: families)
    return prometheus_client.generate_latest(shown).decode()


class Reporter:
    """Writes the metrics of this process to Redis, from the first use of a metric until the process ends."""

    def __init__(self) -> None:
        self.pid = 0
        self.latest: dict[str, float] = {}
        # Asks for a report soon. ``config.queue.publisher`` sets it.
        self.request: Callable[[], None] = lambda: None

    def begin(self) -> None:
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self.request()

    def report(self) -> bool:
        """Send a report. False if Redis failed; the next report has everything again."""
        name, latest = this_process(), dict(self.latest)
        try:
            with redis_client() as client, client.pipeline() as pipeline:
                seconds = PROCESS_SECONDS + round(settings.METRICS_FLUSH_SECONDS)
                pipeline.set(TEXT + name, own_text(), ex=seconds)
                pipeline.sadd(PROCESSES, name)
                if latest:
                    pipeline.hset(LATEST, mapping=latest)
                pipeline.execute()
        except redis_failures() as error:
            logger.debug("metrics are kept until Redis is available (%s)", type(error).__name__)
            return False
        finally:
            self.request()
        for key in [key for key, value in latest.items() if self.latest.get(key) == value]:
            del self.latest[key]
        return True


reporter = Reporter()
declared: dict[str, Metric] = {}


class Metric:
    """A named metric with labels, created once at the import of a module and registered in ``declared``."""

    kind: Any = None

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), **options: Any) -> None:
        self.name, self.help, self.labels = PREFIX + name, help, tuple(labels)
        self.metric = self.kind and self.kind(self.name, help, labels, registry=registry, **options)
        declared[self.name] = self

    def of(self, *labels: str) -> Any:
        reporter.begin()
        return self.metric.labels(*labels) if labels else self.metric


class Counter(Metric):
    """A value that only grows. Its name on the page ends with ``_total``."""

    kind = prometheus_client.Counter

    def create(self, *labels: str) -> None:
        """Show the series as 0 from now on: Prometheus sees no increase in the first value of a series."""
        self.metric.labels(*labels)

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self.of(*labels).inc(by)


class Histogram(Metric):
    """Counts of values in buckets with the upper bounds ``buckets``."""

    kind = staticmethod(partial(prometheus_client.Histogram, buckets=SECONDS))

    def observe(self, value: float, *labels: str) -> None:
        self.of(*labels).observe(value)


class PerProcess(Metric):
    """A value that each process reads at its report."""

    kind = prometheus_client.Gauge

    def follow(self, value: Callable[[], float], *labels: str) -> None:
        self.of(*labels).set_function(value)


class Latest(Metric):
    """The value that was set last, by any process. It outlives the process."""

    def set(self, value: float, *labels: str) -> None:
        reporter.latest[SEPARATOR.join((self.name, *labels))] = value
        reporter.begin()


@dataclass(frozen=True)
class Gauge:
    """Values by their labels, read for each request of the metrics page. ``name`` is without the prefix."""

    name: str
    help: str
    values: dict[Any, float]
    labels: Sequence[str] = ()
