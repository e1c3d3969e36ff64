"""Metrics of this process. Counting does not use the network: a thread (``config.queue.publisher``) writes their text
to Redis, and ``config.api.metrics_page`` joins the texts of all processes (docs/decisions/0004). Clients must not be
able to extend the values of a label.
"""

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
from django.conf import settings
from prometheus_client.core import GaugeMetricFamily

from config import redis

logger = logging.getLogger(__name__)

NAMESPACE = "agents"
PREFIX = f"{NAMESPACE}_"
# In Redis: the names of the processes, the text of each, and when each job last succeeded, which outlives its process.
PROCESSES, TEXT, LATEST = "metrics:processes", "metrics:process:", "metrics:jobs"
LAST_SUCCESS = "housekeeping_last_success_timestamp_seconds"
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
    shown: Any = SimpleNamespace(collect=lambda: families)
    return prometheus_client.generate_latest(shown).decode()


Counter = partial(prometheus_client.Counter, namespace=NAMESPACE, registry=registry)
Histogram = partial(prometheus_client.Histogram, namespace=NAMESPACE, registry=registry, buckets=SECONDS)
# A value that each process reads at its report, by ``set_function``.
PerProcess = partial(prometheus_client.Gauge, namespace=NAMESPACE, registry=registry)
# When each job last succeeded, until that is reported.
succeeded: dict[str, float] = {}


def report() -> None:
    """Send this process's metrics to Redis. If Redis fails, the next report has everything again."""
    name, latest = this_process(), dict(succeeded)
    try:
        with redis.client() as client, client.pipeline() as pipeline:
            pipeline.set(TEXT + name, own_text(), ex=PROCESS_SECONDS + round(settings.METRICS_FLUSH_SECONDS))
            pipeline.sadd(PROCESSES, name)
            if latest:
                pipeline.hset(LATEST, mapping=latest)
            pipeline.execute()
    except redis.failures() as error:
        logger.debug("metrics are kept until Redis is available (%s)", type(error).__name__)
        return
    for job in [job for job, at in latest.items() if succeeded.get(job) == at]:
        del succeeded[job]


class Gauge(GaugeMetricFamily):
    """Values by their labels, read for each request of the metrics page. ``name`` is without the namespace."""

    def __init__(self, name: str, help: str, values: dict[Any, float], labels: Sequence[str] = ()) -> None:
        super().__init__(PREFIX + name, help, labels=labels)
        for key, value in sorted(values.items()):
            self.add_metric(key, value)
