"""When which model is asked again after a request failed. Decides only; the engine records the decision and waits."""

import random
from collections.abc import Sequence

from django.conf import settings

from runs.llm.base import ModelError

# Longest wait after the first failed request; it doubles with each further one.
MODEL_RETRY_SECONDS = 0.5
# Longest wait between two requests, also if the provider asks for more.
MODEL_RETRY_AFTER_MAX_SECONDS = 60


def after(error: ModelError, asked: Sequence[str], chain: Sequence[str], seconds_left: float) -> tuple[str, float]:
    """The model that is asked after a failed request, and in how many seconds; empty if none is.

    ``asked`` are the models of the turn's failed requests, the last one included; ``chain`` are the models that the
    run may ask, in order. A wait never goes past ``seconds_left``, the run's time.
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
    """What the provider asked for, up to a limit; otherwise a backoff with full jitter."""
    if retry_after is not None:
        return min(retry_after, MODEL_RETRY_AFTER_MAX_SECONDS)
    longest = MODEL_RETRY_SECONDS * 2 ** (tries - 1)
    return random.uniform(0.0, min(longest, MODEL_RETRY_AFTER_MAX_SECONDS))  # noqa: S311
