"""The steps of a process that wait for credits which other steps of the same user hold: only the first one of each user
looks, the oldest run's. ``lifecycle.wait_for_credits`` keeps the order between processes.
"""

import asyncio
import contextlib
from bisect import insort
from collections.abc import Awaitable, Callable
from datetime import datetime

# Between two looks, growing: another process may have settled a hold, or staff granted credits.
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.05, 1.0

# The run's moment of creation and its id.
Age = tuple[datetime, str]


class CreditLine:
    """``leaving``: whether the process drains; the waits then end."""

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        # By user: the ages of the waiting steps' runs, with what wakes the steps.
        self._lines: dict[int, list[tuple[Age, asyncio.Event]]] = {}

    async def wait(self, user_id: int, age: Age, waits: Callable[[], Awaitable[bool]]) -> None:
        """Wait as long as a step of a run of that age ``waits``, which only the first of the user's line asks."""
        place = age, asyncio.Event()
        line = self._lines.setdefault(user_id, [])
        insort(line, place, key=lambda other: other[0])
        pause = LOOK_SECONDS
        try:
            while not self.leaving():
                place[1].clear()
                if line[0] is place and not await waits():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await place[1].wait()
                pause = min(2 * pause, LOOK_SECONDS_MAX)
        finally:
            line.remove(place)
            if not line:
                del self._lines[user_id]
            self.wake(user_id)

    def wake(self, user_id: int) -> None:
        """Credits of the user may be free, or another step is the first now."""
        if line := self._lines.get(user_id):
            line[0][1].set()
