"""Nudges: task messages that tell a worker to look at some ids now.

A lost nudge only delays work, because a sweep finds all due work. A nudge contains no data except ids.
"""

import logging
from collections.abc import Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial

from django.db import transaction

from config.queue.publisher import Source
from config.telemetry import tracing
from config.telemetry.metrics import Counter

logger = logging.getLogger(__name__)

unsent = Counter("nudges_failed", "Messages that the broker did not take; sweeps find what they announced.")

# A single nudge is sent at once. Further nudges after it wait and are sent in one message: the wait is this time for
# each nudge of the last message, up to a limit. So few nudges hardly wait, and many need few messages.
GATHER_SECONDS_PER_NUDGE = 0.005
GATHER_SECONDS = 0.02
# Few enough that several workers share a burst evenly.
MESSAGE_MAX_IDS = 8


@dataclass(frozen=True, slots=True)
class Nudge:
    task: str
    ids: tuple[str, ...]
    countdown: float | None
    context: Context  # the caller's, because the message contains its request id and trace


def send(nudges: list[Nudge]) -> None:
    # The web processes have imported Celery. Most commands of manage.py send nothing and do without it.
    from config.celery import app

    publish = partial(app.send_task, retry=False, ignore_result=True)
    for nudge in grouped(nudges):
        nudge.context.run(publish, nudge.task, args=nudge.ids, countdown=nudge.countdown)
    source.interval_seconds = min(GATHER_SECONDS, len(nudges) * GATHER_SECONDS_PER_NUDGE)


def failed(error: Exception) -> None:
    unsent.inc()
    logger.warning("the broker did not accept a message (%s); the sweep will find the due work", type(error).__name__)


source = Source(send, GATHER_SECONDS_PER_NUDGE, failed)


def grouped(nudges: Iterable[Nudge]) -> Iterator[Nudge]:
    """Merge nudges of one task into few messages. A nudge within a trace is not merged: a message has one trace."""
    found: dict[object, list[Nudge]] = {}
    for nudge in nudges:
        key = object() if nudge.context.run(tracing.current) else (nudge.task, nudge.countdown)
        found.setdefault(key, []).append(nudge)
    for same in found.values():
        ids = tuple(dict.fromkeys(name for nudge in same for name in nudge.ids))
        for start in range(0, len(ids) or 1, MESSAGE_MAX_IDS):
            yield replace(same[0], ids=ids[start : start + MESSAGE_MAX_IDS])


def nudge(task: str, *ids: str, countdown: float | None = None) -> None:
    """Publish ``task`` soon, or after ``countdown`` seconds, with these and other ids. Never blocks or raises."""
    source.put(Nudge(task, ids, countdown, copy_context()))


def nudge_after_commit(task: str, *ids: str, countdown: float | None = None) -> None:
    """Like ``nudge``, after the commit of the current transaction, or at once without a transaction."""
    transaction.on_commit(lambda: nudge(task, *ids, countdown=countdown), robust=True)
