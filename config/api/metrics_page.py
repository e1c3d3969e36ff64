"""``GET /metrics`` for Prometheus: the metrics of all processes, and the present state of the database and the broker.

Every web process gives the same answer, so Prometheus scrapes the service's own address. Values from the database are
counted from indexes of live rows, and kept for METRICS_CACHE_SECONDS.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import Error, connection
from django.http import HttpRequest, HttpResponse
from django.utils.module_loading import import_string
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from config.api.errors import error_response
from config.database.retry import CONNECTION_ERRORS, outage
from config.redis import client as redis_client
from config.redis import failures as redis_failures
from config.telemetry import metrics
from config.telemetry.metrics import BUCKET, PREFIX, SEPARATOR, TOTAL, Gauge

logger = logging.getLogger(__name__)


@dataclass
class Reading:
    """Values read from the database and from Redis at one time; ``up`` says which of them answered."""

    gauges: list[Gauge] = field(default_factory=list)
    sums: dict[str, str] = field(default_factory=dict)
    latest: dict[str, str] = field(default_factory=dict)
    processes: dict[str, float] = field(default_factory=dict)
    up: dict[str, bool] = field(default_factory=dict)


@csrf_exempt
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """200 with the text format; 401 without ``Authorization: Bearer METRICS_TOKEN``, unless DEBUG is on."""
    if not (settings.DEBUG or is_allowed(request.META.get("HTTP_AUTHORIZATION", ""))):
        response = error_response(401)
    else:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Families(reading()))
        response = HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
    response["Cache-Control"] = "no-store"
    return response


def is_allowed(authorization: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    wanted = settings.METRICS_TOKEN.encode()
    return (
        bool(wanted)
        and scheme.lower() == "bearer"
        and hmac.compare_digest(token.strip().encode("utf-8", "replace"), wanted)
    )


_lock = threading.Lock()
_kept: tuple[float, Reading] | None = None


def reading() -> Reading:
    """The latest reading, at most METRICS_CACHE_SECONDS old. One request reads; concurrent requests wait for it."""
    global _kept
    with _lock:
        if _kept is None or time.monotonic() - _kept[0] >= settings.METRICS_CACHE_SECONDS:
            _kept = (time.monotonic(), read())
        return _kept[1]


def read() -> Reading:
    found = Reading()
    found.up["redis"] = _read_redis(found)
    found.up["database"] = _read_database(found)
    return found


def _read_redis(found: Reading) -> bool:
    try:
        with redis_client(decode_responses=True) as client:
            found.sums = client.hgetall(metrics.SUMS)
            found.latest = client.hgetall(metrics.LATEST)
            rows: Any = client.hgetall(metrics.PROCESSES)
            found.processes, gone = metrics.process_values(rows, metrics.redis_time(client))
            if gone:
                client.hdel(metrics.PROCESSES, *gone)
            queues = list(settings.CELERY_TASK_QUEUES)
            depths: dict[tuple[str, ...], float] = {(name,): float(client.llen(name)) for name in queues}
    except redis_failures() as error:
        logger.warning("metrics without Redis (%s)", type(error).__name__)
        return False
    found.gauges.append(
        Gauge("queue_messages", "Messages in the broker that no worker has fetched.", depths, ["queue"])
    )
    return True


def _read_database(found: Reading) -> bool:
    try:
        for name in settings.METRICS_SOURCES:
            source: Callable[[], Iterable[Gauge]] = import_string(name)
            found.gauges += source()
    except CONNECTION_ERRORS as error:
        connection.close()
        outage.failed(error)
        return False
    except Error as error:
        connection.close()
        logger.warning("metrics without the database (%s)", type(error).__name__)
        return False
    outage.ended()
    return True


class Families:
    """A reading as a collector of prometheus_client's registry."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def collect(self) -> Iterator[Metric]:
        up = {(name,): float(answers) for name, answers in self.reading.up.items()}
        yield _gauge(Gauge("source_up", "Whether the source of these metrics answered.", up, ["source"]))
        for gauge in self.reading.gauges:
            yield _gauge(gauge)
        sums, latest = _by_metric(self.reading.sums), _by_metric(self.reading.latest)
        processes = _by_metric(self.reading.processes)
        for name, metric in metrics.declared.items():
            if isinstance(metric, metrics.Counter):
                yield _counter(metric, sums.get(name, {}))
            elif isinstance(metric, metrics.Histogram):
                yield _histogram(metric, sums.get(name, {}))
            elif isinstance(metric, metrics.Latest):
                yield _gauge(Gauge(name.removeprefix(PREFIX), metric.help, latest.get(name, {}), metric.labels))
            else:
                values = processes.get(name, {} if metric.labels else {(): 0.0})
                yield _gauge(Gauge(name.removeprefix(PREFIX), metric.help, values, metric.labels))


def _by_metric(rows: Mapping[str, str | float]) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for key, value in rows.items():
        name, *labels = key.split(SEPARATOR)
        found.setdefault(name, {})[tuple(labels)] = float(value)
    return found


def _gauge(gauge: Gauge) -> Metric:
    family = GaugeMetricFamily(PREFIX + gauge.name, gauge.help, labels=gauge.labels)
    return _filled(family, len(gauge.labels), gauge.values)


def _counter(metric: metrics.Counter, rows: dict[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    return _filled(family, len(metric.labels), rows if metric.labels else {(): 0.0} | rows)


def _filled(family: Any, count: int, rows: dict[tuple[str, ...], float]) -> Metric:
    for labels, value in sorted(rows.items()):
        if len(labels) == count:  # otherwise it was counted by a release with other labels
            family.add_metric(labels, value)
    return family


def _histogram(metric: metrics.Histogram, rows: dict[tuple[str, ...], float]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    found: dict[tuple[str, ...], dict[str, float]] = {}
    totals: dict[tuple[str, ...], float] = {}
    for key, value in rows.items():
        if key[-1:] == (TOTAL,):
            totals[key[:-1]] = value
        elif key[-2:-1] == (BUCKET,):
            found.setdefault(key[:-2], {})[key[-1]] = value
    for labels, counts in sorted(found.items()):
        if len(labels) != len(metric.labels):
            continue
        running, buckets = 0.0, []
        for name in metric.names:
            running += counts.get(name, 0.0)
            buckets.append((name, running))
        family.add_metric(labels, buckets, totals.get(labels, 0.0))
    return family
