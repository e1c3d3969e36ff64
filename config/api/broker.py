"""Nudges: task messages that only say "look now". Losing one costs time, never work, for a sweep finds what is due."""

import logging
import time

from celery import current_app
from django.db import transaction

from config.api.metrics import Counter

logger = logging.getLogger(__name__)

unsent = Counter("nudges_failed", "Messages that the broker did not take; sweeps find what they told of.")

# After a failure this process publishes nothing for so long: a stalled broker costs one time-out, not one a request.
PAUSE_SECONDS = 5.0

_paused_until = 0.0


def nudge(task: str, *args: str | int, countdown: float | None = None) -> None:
    """Publish ``task`` now. Never raises: the broker's absence fails no request."""
    global _paused_until
    if time.monotonic() < _paused_until:
        return
    try:
        current_app.send_task(task, args=args, countdown=countdown, retry=False, ignore_result=True)
    except Exception as error:
        _paused_until = time.monotonic() + PAUSE_SECONDS
        unsent.inc()
        logger.warning("the broker took no message (%s); the sweep will find what is due", type(error).__name__)


def nudge_after_commit(task: str, *args: str | int, countdown: float | None = None) -> None:
    """Publish ``task`` once the surrounding transaction is committed, at once outside of one."""
    transaction.on_commit(lambda: nudge(task, *args, countdown=countdown), robust=True)
