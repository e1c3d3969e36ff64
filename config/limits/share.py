"""Share: what the users of a process share, such as places for tool calls, bytes in memory and threads.

What exceeds a user's share waits in the user's own line, in order and never before others' work, or is refused.
"""

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHORT_INPUT = 1000  # work on an input of this size takes about as long as a change of threads, milliseconds at most


class Share:
    """``per_user`` places for each user. Any thread and any event loop may use them."""

    def __init__(self, per_user: int) -> None:
        self.per_user = per_user
        self.taken = 0
        self._taken = Counter[Hashable]()
        self._lines: dict[Hashable, deque[tuple[int, Future[None]]]] = {}
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(not turn.cancelled() for line in self._lines.values() for _, turn in line)

    @contextlib.asynccontextmanager
    async def hold(self, user: Hashable, amount: int = 1) -> AsyncIterator[None]:
        """Hold ``amount`` places, at most ``per_user``. The wait has no time limit; a cancel ends it."""
        amount = min(amount, self.per_user)
        await self.take(user, amount)
        try:
            yield
        finally:
            self.give_back(user, amount)

    async def take(self, user: Hashable, amount: int = 1) -> None:
        """Wait for places, which the caller gives back. ``amount`` is at most ``per_user``."""
        turn = Future[None]()  # not of one event loop: the places may be given back on another one's thread
        with self._lock:
            self._lines.setdefault(user, deque()).append((amount, turn))
            self._advance(user)
        if turn.done():
            return
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if turn.cancel():
                self._advance(user)
            else:  # the places came at the moment of the cancel
                self.give_back(user, amount)
            raise

    def take_now(self, user: Hashable, amount: int = 1) -> bool:
        """Take places, which the caller gives back, if that needs no wait. Returns whether it did."""
        with self._lock:
            if user in self._lines or not self._has_room(self._taken[user], amount):
                return False
            self._add(user, amount)
            return True

    def give_back(self, user: Hashable, amount: int = 1) -> None:
        with self._lock:
            self._add(user, -amount)
            self._advance(user)

    def _has_room(self, taken: int, amount: int) -> bool:
        return taken + amount <= self.per_user

    def _add(self, user: Hashable, amount: int) -> None:
        self.taken += amount
        self._taken[user] += amount
        if not self._taken[user]:
            del self._taken[user]

    def _advance(self, user: Hashable) -> None:
        with self._lock:
            line = self._lines.get(user, deque())
            while line and (line[0][1].cancelled() or self._has_room(self._taken[user], line[0][0])):
                amount, turn = line.popleft()
                if turn.set_running_or_notify_cancel():
                    self._add(user, amount)
                    turn.set_result(None)
            if not line:
                self._lines.pop(user, None)


class Room(Share):
    """A number of bytes that all users share. A user may take a third of what remains free after that: one user alone
    takes at most a quarter, and many together still leave a share for the next. Only for ``take_now``.
    """

    def _has_room(self, taken: int, amount: int) -> bool:
        return 3 * (taken + amount) <= self.per_user - self.taken - amount


class Held(contextlib.AbstractContextManager):
    """The places of one user's calls, by call id. ``with`` gives back the places of calls that never began."""

    def __init__(self, share: Share, user_id: int) -> None:
        self._share, self._user_id = share, user_id
        self._calls: set[str] = set()

    def take_now(self, call_id: str) -> bool:
        taken = self._share.take_now(self._user_id)
        if taken:
            self._calls.add(call_id)
        return taken

    @contextlib.asynccontextmanager
    async def place(self, call_id: str) -> AsyncIterator[None]:
        """Hold the call's place; wait for one if it has none."""
        if call_id not in self._calls:
            await self._share.take(self._user_id)
            self._calls.add(call_id)
        try:
            yield
        finally:
            self.give_back(call_id)

    def give_back(self, call_id: str) -> None:
        """Does nothing if the call holds no place."""
        if call_id in self._calls:
            self._calls.remove(call_id)
            self._share.give_back(self._user_id)

    def __exit__(self, *error: object) -> None:
        for call_id in list(self._calls):
            self.give_back(call_id)


class Threads:
    """``count`` threads for work that blocks or computes. Each user may occupy ``per_user`` of them."""

    def __init__(self, count: int, per_user: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._share = Share(per_user)

    async def run(self, user_id: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function on a thread. Nothing can stop a thread: the function limits its own time."""
        await self._share.take(user_id)
        call = partial(copy_context().run, function, *args, **kwargs)
        work = asyncio.get_running_loop().run_in_executor(self._pool, call)
        # After a cancel, the thread and the user's place stay occupied until the function returns.
        work.add_done_callback(lambda _: self._share.give_back(user_id))
        return await asyncio.shield(work)

    async def compute(self, user_id: int, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function whose time grows with ``size``, its input's characters or bytes: at once if it is small."""
        if size <= SHORT_INPUT:
            return function(*args, **kwargs)
        return await self.run(user_id, function, *args, **kwargs)

    def shutdown(self) -> None:
        """Begin no more work. Does not wait for busy threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
