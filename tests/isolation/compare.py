"""Compares what a modest user waits for, without a greedy user and then beside one."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

SAMPLES = 10
RATIO_MAX = 2.0
# The modest user's p99 may always take this long, because a busy machine can double a few milliseconds by itself.
FLOOR_SECONDS = 0.5


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(len(seconds) * 0.99) - 1]


def assert_isolated(act: Callable[[], object], greedy: Callable[[], AbstractContextManager[object]]) -> None:
    """``act`` is one action of the modest user, ``greedy`` the greedy user's load while it is entered."""
    act()  # the first one opens connections and fills caches
    alone = [timed(act) for _ in range(SAMPLES)]
    with greedy():
        beside = [timed(act) for _ in range(SAMPLES)]
    limit = max(RATIO_MAX * p99(alone), FLOOR_SECONDS)
    assert p99(beside) <= limit, f"p99 {p99(beside):.3f} s beside the greedy user, {p99(alone):.3f} s without"


def timed(act: Callable[[], object]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun
