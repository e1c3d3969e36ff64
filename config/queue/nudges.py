"""Nudges: task messages that only say "look now". A lost one costs time, never work: a sweep finds what is due."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, replace

from celery import current_app
from django.db import transaction

from config.queue.publisher import Source, publisher
from config.telemetry import tracing
from config.telemetry.metrics import Counter

logger = logging.getLogger(__name__)

unsent = Counter("nudges_failed", "Messages that the broker did not take; sweeps find what they announced.")

PAUSE_SECONDS = 5.0
# An idle process sends at once; a busy one sends a few ids at a time.
GATHER_SECONDS = 0.02
# Few enough that several workers share a burst evenly.
MESSAGE_MAX_IDS = 8


@dataclass(frozen=True, slots=True)
class Nudge:
    task: str
    ids: tuple[str, ...]
    countdown: float | None
    # The caller's: its request id and trace go with the message.
    context: Context


def send(nudges: list[Nudge]) -> None:
    for nudge in together(nudges):
        nudge.context.run(
            current_app.send_task,
            nudge.task,
            args=nudge.ids,
            countdown=nudge.countdown,
            retry=False,
            ignore_result=True,
        )


def failed(error: Exception) -> None:
    unsent.inc()
    logger.warning("the broker took no message (%s); the sweep will find what is due", type(error).__name__)


source = Source(send, GATHER_SECONDS, PAUSE_SECONDS, failed)


def together(nudges: Iterable[Nudge]) -> Iterator[Nudge]:
    """As few messages as possible. A nudge under a trace is sent by itself, because a message has one trace."""
    found: dict[object, list[Nudge]] = {}
    for nudge in nudges:
        key = object() if nudge.context.run(tracing.current) else (nudge.task, nudge.countdown)
        found.setdefault(key, []).append(nudge)
    for same in found.values():
        ids = tuple(dict.fromkeys(name for nudge in same for name in nudge.ids))
        for start in range(0, len(ids) or 1, MESSAGE_MAX_IDS):
            yield replace(same[0], ids=ids[start : start + MESSAGE_MAX_IDS])


def nudge(task: str, *ids: str, countdown: float | None = None) -> None:
    """Publish ``task`` soon, with these ids and perhaps those of other callers. Never waits and never raises."""
    publisher.put(source, Nudge(task, ids, countdown, copy_context()))


def nudge_after_commit(task: str, *ids: str, countdown: float | None = None) -> None:
    """As ``nudge``, once the surrounding transaction is committed; at once outside of one."""
    transaction.on_commit(lambda: nudge(task, *ids, countdown=countdown), robust=True)
