"""The steps of a process that wait for credits which other steps of the same user hold: only the first one of each user
looks, the oldest run's. ``lifecycle.wait_for_credits`` keeps the order between processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import datetime

# Between two looks, growing: another process may have settled a hold, or staff granted credits.
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.05, 1.0

# The run's moment of creation and its id.
Age = tuple[datetime, str]


class Place:
    def __init__(self, line: list[Place], age: Age) -> None:
        self.line, self.age = line, age
        self._woken = asyncio.Event()
        self.clear, self.wake = self._woken.clear, self._woken.set
        self._pause = LOOK_SECONDS

    @property
    def is_first(self) -> bool:
        return self is self.line[0]

    async def wait(self) -> None:
        """Until the next look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._woken.wait()
        self._pause = min(2 * self._pause, LOOK_SECONDS_MAX)


class CreditLine:
    def __init__(self) -> None:
        self._lines: dict[int, list[Place]] = {}

    @contextlib.contextmanager
    def place(self, user_id: int, age: Age) -> Iterator[Place]:
        """A place in the user's line, for a step of a run of that age."""
        line = self._lines.setdefault(user_id, [])
        place = Place(line, age)
        line.append(place)
        line.sort(key=lambda other: other.age)
        try:
            yield place
        finally:
            line.remove(place)
            if not line:
                del self._lines[user_id]
            self.wake(user_id)

    def wake(self, user_id: int) -> None:
        """Credits of the user may be free, or another step is the first now."""
        if line := self._lines.get(user_id):
            line[0].wake()
