"""What the apps' scheduled jobs share: metrics, bad rows, and their early end when the worker stops."""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from config.database import batches
from config.database.retry import attempt, is_unavailable, outage
from config.kernel import clock
from config.telemetry import metrics

HOUSEKEEPING_RETRY_SECONDS = 60  # for this time, a process does not try a row that failed again

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

rows_done = metrics.Counter("housekeeping_rows", "Rows that housekeeping processed.", ["job"])
rows_failed = metrics.Counter("housekeeping_rows_failed", "Rows that housekeeping could not process.", ["job"])
failures = metrics.Counter("housekeeping_failures", "Housekeeping jobs that failed.", ["job"])

LOGGED_MAX = 10  # failed rows of one run; all are counted
REMEMBERED_MAX = 10_000
_left_out: dict[tuple[str, Hashable], float] = {}  # (job, key) of rows that failed, and until when they are left out


def run(job: str, work: Callable[[], int]) -> int:
    """Run the job, which has this name in JOBS of the settings, and record its metrics. Returns the number of rows that
    ``work`` processed. Raises its exceptions, unless the database is not available: then the next run continues, and
    the log has one line for the whole outage.
    """
    for counter in (failures, rows_failed):
        counter.labels(job)  # as 0: Prometheus sees no increase in the first value of a series
    try:
        done = attempt(work)
    except Exception as error:
        failures.labels(job).inc()
        if not is_unavailable(error):
            raise
        outage.failed(error)
        return 0
    outage.ended()
    rows_done.labels(job).inc(done)
    metrics.succeeded[job] = clock.now().timestamp()
    return done


def each(job: str, keys: Iterable[K], work: Callable[[K], R], seconds: float = math.inf) -> Iterator[R]:
    """The results of ``work(key)``, which processes one row. Ends when the worker stops, or after ``seconds``. A row
    that raises is logged, counted and left out for HOUSEKEEPING_RETRY_SECONDS; only CONNECTION_ERRORS end the job.
    """
    return each_batch(job, keys, lambda batch: [work(batch[0])], 1, seconds)


def each_batch(
    job: str, keys: Iterable[K], work: Callable[[list[K]], Iterable[R]], size: int, seconds: float = math.inf
) -> Iterator[R]:
    """``each``, for ``work`` on ``size`` rows in one transaction. If it raises, each of these rows is tried alone."""
    end, failed = time.monotonic() + seconds, 0
    left = (key for key in keys if time.monotonic() >= _left_out.get((job, key), 0))
    alone: list[list[K]] = []
    while batch := alone.pop() if alone else list(islice(left, size)):
        if batches.stopping.is_set() or time.monotonic() > end:
            return
        try:
            results = attempt(work, batch)
        except Exception as error:
            if is_unavailable(error):
                raise
            if len(batch) > 1:
                alone = [[key] for key in reversed(batch)]
                continue
            failed += 1
            rows_failed.labels(job).inc()
            if len(_left_out) >= REMEMBERED_MAX:
                _left_out.clear()
            _left_out[job, batch[0]] = time.monotonic() + HOUSEKEEPING_RETRY_SECONDS
            if failed <= LOGGED_MAX:
                logger.exception("%s could not process %s", job, batch[0])
        else:
            yield from results


def stages(job: str, *works: Callable[..., int], **arguments: Any) -> int:
    """The sum of ``works``, each called with ``arguments``. If one raises, this is logged and counted, and the others
    follow, except in an outage.
    """
    done = 0
    for work in works:
        try:
            done += attempt(work, **arguments)
        except Exception as error:
            if is_unavailable(error):
                raise
            failures.labels(job).inc()
            logger.exception("a stage of %s failed: %s", job, work.__name__)
    return done
