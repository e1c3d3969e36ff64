"""Parallel calls in threads that close their database connections."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

from django.db import connection

T = TypeVar("T")


def side_by_side(count: int, call: Callable[[int], T]) -> list[T]:
    """The results of ``call(0)`` … ``call(count - 1)``, which start at the same moment."""
    barrier = Barrier(count)

    def run(number: int) -> T:
        barrier.wait(30)
        try:
            return call(number)
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
