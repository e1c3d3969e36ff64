"""Decides which model is asked after a failed request, and when. The engine records the decision and waits."""

import random
from collections.abc import Sequence

from django.conf import settings

from runs.llm.base import ModelError

# Longest wait after a model's first failed request, in seconds; it doubles with each further one.
MODEL_RETRY_SECONDS = 0.5
# Longest wait between two requests, also if the provider asks for more.
MODEL_RETRY_AFTER_MAX_SECONDS = 60


def after(error: ModelError, asked: Sequence[str], chain: Sequence[str], seconds_left: float) -> tuple[str, float]:
    """The model that is asked after a failed request, and in how many seconds; an empty name if none is.

    ``asked``: the models of the turn's failed requests, the last one included. ``chain``: the models that the run may
    ask, in order. A wait must end within ``seconds_left``, the run's remaining time.
    """
    model = asked[-1]
    tries = asked.count(model)
    if error.retried and tries < settings.MODEL_ATTEMPTS:
        delay = wait_seconds(tries, error.retry_after)
        if delay < seconds_left:
            return model, delay
    others = [name for name in chain if name not in asked] if seconds_left > 0 else []
    return next(iter(others), ""), 0.0


def wait_seconds(tries: int, retry_after: float | None) -> float:
    """The wait that the provider asked for, up to a limit; otherwise a backoff with full jitter."""
    if retry_after is not None:
        return min(retry_after, MODEL_RETRY_AFTER_MAX_SECONDS)
    longest = MODEL_RETRY_SECONDS * 2 ** (tries - 1)
    return random.uniform(0.0, min(longest, MODEL_RETRY_AFTER_MAX_SECONDS))  # noqa: S311
