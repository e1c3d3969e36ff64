"""Calls in threads: parallel ones that close their database connections, and one that is repeated."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Thread
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


class Repeating:
    """Calls ``action`` every half second, until ``stop`` has returned."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            self.action()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)
