"""``GET /metrics`` for Prometheus: the metrics of all processes, and the present state of the database and the broker.
Every web process gives the same answer, so Prometheus scrapes the service's own address.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from django.conf import settings
from django.db import Error, connection
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.utils.module_loading import import_string
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST

from config import redis
from config.api.errors import error_response
from config.database.retry import CONNECTION_ERRORS, outage
from config.telemetry import metrics
from config.telemetry.metrics import Gauge

logger = logging.getLogger(__name__)


@dataclass
class Reading:
    """What was read from the database and Redis, if they are ``up``: gauges, other processes' texts, ends of jobs."""

    gauges: list[Gauge] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: dict[tuple[str], float] = field(default_factory=dict)
    up: dict[str, bool] = field(default_factory=dict)


@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """200 with the text format; 401 without ``Authorization: Bearer METRICS_TOKEN``, unless DEBUG is on."""
    scheme, _, token = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
    known = scheme.lower() == "bearer" and constant_time_compare(token.strip(), settings.METRICS_TOKEN)
    if settings.DEBUG or (settings.METRICS_TOKEN and known):
        found, help = reading(), "When the job last succeeded, in seconds since the epoch."
        answered = {(name,): float(answers) for name, answers in found.up.items()}
        up = Gauge("source_up", "Whether the source of these metrics answered.", answered, ["source"])
        families = [up, Gauge(metrics.LAST_SUCCESS, help, found.ends, ["job"]), *found.gauges]
        text = metrics.exposition(families) + joined([metrics.own_text(), *found.texts])
        response = HttpResponse(text, content_type=CONTENT_TYPE_LATEST)
    else:
        response = error_response(401)
    response["Cache-Control"] = "no-store"
    return response


_lock = threading.Lock()
_kept: tuple[float, Reading] | None = None


def reading() -> Reading:
    """The latest reading, at most METRICS_CACHE_SECONDS old. One request reads; concurrent requests wait for it."""
    global _kept
    with _lock:
        if _kept is None or time.monotonic() - _kept[0] >= settings.METRICS_CACHE_SECONDS:
            found = Reading()
            found.up = {"redis": _read_redis(found), "database": _read_database(found)}
            _kept = (time.monotonic(), found)
        return _kept[1]


def _read_redis(found: Reading) -> bool:
    try:
        with redis.client(decode_responses=True) as client:
            found.ends = {(job,): float(at) for job, at in client.hgetall(metrics.LATEST).items()}
            names = list(client.smembers(metrics.PROCESSES) - {metrics.this_process()})
            texts = client.mget([metrics.TEXT + name for name in names]) if names else []
            found.texts = [text for text in texts if text]
            if ended := [name for name, text in zip(names, texts, strict=True) if not text]:
                client.srem(metrics.PROCESSES, *ended)
            depths = {(name,): float(client.llen(name)) for name in settings.CELERY_TASK_QUEUES}
    except redis.failures() as error:
        logger.warning("metrics without Redis (%s)", type(error).__name__)
        return False
    help = "Messages in the broker that no worker has fetched."
    found.gauges.append(Gauge("queue_messages", help, depths, ["queue"]))
    return True


def _read_database(found: Reading) -> bool:
    try:
        for source in settings.METRICS_SOURCES:
            found.gauges += import_string(source)()
    except Error as error:
        connection.close()
        if isinstance(error, CONNECTION_ERRORS):
            outage.failed(error)
        else:
            logger.warning("metrics without the database (%s)", type(error).__name__)
        return False
    outage.ended()
    return True


def joined(texts: Iterable[str]) -> str:
    """The texts of several processes joined into one: the samples of a metric must follow each other."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for family in f"\n{text}".split("\n# HELP ")[1:]:
            about, kind, *samples = family.rstrip("\n").split("\n")
            families.setdefault(about.partition(" ")[0], [f"# HELP {about}", kind]).extend(samples)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
