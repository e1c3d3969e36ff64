"""Shares of what the users of a process share: places for tool calls, bytes in memory, threads.

A user's excess waits in the user's own line, first in, first out, and never before the work of other users. What is
limited, and how many places a user has, is declared where the places are made. One event loop uses them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Work on an input of this size takes about as long as the change to a thread, at most a few milliseconds.
SHORT_INPUT = 1000


@dataclass(slots=True)
class _Share:
    taken: int = 0
    line: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class Places:
    """``per_user`` places for each user. ``taken`` and ``waiting`` are the sums of all users, for any thread."""

    def __init__(self, per_user: int) -> None:
        self.per_user = per_user
        self.taken = 0
        self.waiting = 0
        self._shares: dict[int, _Share] = {}

    @contextlib.asynccontextmanager
    async def hold(self, user_id: int, amount: int = 1) -> AsyncIterator[None]:
        """Hold ``amount`` places, or all of the user's if that is fewer. Waits without a limit; a cancel ends it."""
        amount = min(amount, self.per_user)
        await self.take(user_id, amount)
        try:
            yield
        finally:
            self.give_back(user_id, amount)

    async def take(self, user_id: int, amount: int = 1) -> None:
        """Wait for places, which the caller gives back. ``amount`` is at most ``per_user``."""
        turn = asyncio.get_running_loop().create_future()
        self._shares.setdefault(user_id, _Share()).line.append((amount, turn))
        self._advance(user_id)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._advance(user_id)
            else:  # the places were given in the moment of the cancel
                self.give_back(user_id, amount)
            raise
        finally:
            self.waiting -= 1

    def take_now(self, user_id: int) -> bool:
        """Take a place, which the caller gives back, if that needs no wait. Returns whether it did."""
        share = self._shares.setdefault(user_id, _Share())
        if share.line or share.taken >= self.per_user:
            return False
        share.taken += 1
        self.taken += 1
        return True

    def give_back(self, user_id: int, amount: int = 1) -> None:
        self._shares[user_id].taken -= amount
        self.taken -= amount
        self._advance(user_id)

    def _advance(self, user_id: int) -> None:
        share = self._shares.get(user_id)
        if share is None:
            return
        while share.line:
            amount, turn = share.line[0]
            if not turn.cancelled():
                if share.taken + amount > self.per_user:
                    break
                share.taken += amount
                self.taken += amount
                turn.set_result(None)
            share.line.popleft()
        if not (share.line or share.taken):
            del self._shares[user_id]


class Held:
    """The places that one user's calls hold, by the calls' ids. ``with`` gives back those that are left at its end, of
    calls whose tasks were cancelled before they began.
    """

    def __init__(self, places: Places, user_id: int) -> None:
        self._places, self._user_id = places, user_id
        self._calls: set[str] = set()

    def take_now(self, call_id: str) -> bool:
        if not self._places.take_now(self._user_id):
            return False
        self._calls.add(call_id)
        return True

    @contextlib.asynccontextmanager
    async def place(self, call_id: str) -> AsyncIterator[None]:
        """Hold the call's place; wait for one if it has none."""
        if call_id not in self._calls:
            await self._places.take(self._user_id)
            self._calls.add(call_id)
        try:
            yield
        finally:
            self.give_back(call_id)

    def give_back(self, call_id: str) -> None:
        """Does nothing if the call holds no place."""
        if call_id in self._calls:
            self._calls.remove(call_id)
            self._places.give_back(self._user_id)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        for call_id in list(self._calls):
            self.give_back(call_id)


class Threads:
    """``count`` threads for work that blocks or computes. Each user may occupy ``per_user`` of them."""

    def __init__(self, count: int, per_user: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._places = Places(per_user)

    async def run(self, user_id: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function on a thread. Nothing can stop a thread: the function limits its own time."""
        await self._places.take(user_id)
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, partial(copy_context().run, function, *args, **kwargs)
        )
        # After a cancel, the thread and the user's place stay occupied until the function returns.
        work.add_done_callback(lambda _: self._places.give_back(user_id))
        return await asyncio.shield(work)

    async def compute(self, user_id: int, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function whose time grows with ``size``, its input's characters or bytes: at once if that is short."""
        if size <= SHORT_INPUT:
            return function(*args, **kwargs)
        return await self.run(user_id, function, *args, **kwargs)

    def shutdown(self) -> None:
        """Begin nothing more. Does not wait for the threads at work."""
        self._pool.shutdown(wait=False, cancel_futures=True)
