"""The requests of a process to models: those at work, and those that wait for a place at a provider with limits.

A waiting run is a future, without thread, connection or timer. One thread asks for places for all of them, at once when
something changed and otherwise at intervals; it also renews the places that the process holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from django.db import connection

from config.database.retry import CONNECTION_ERRORS, attempt, outage
from runs import catalogue, metrics
from runs.catalogue.providers import Server
from runs.llm import limits
from runs.llm.limits import Demand, Limits

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
# Changes within this time are stated together.
GATHER_SECONDS = 0.005
# After an error.
PAUSE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Request:
    """``turn`` ends with whether the request may begin."""

    turn: asyncio.Future[bool]
    may_begin: bool = False

    def answer(self, may_begin: bool) -> None:
        self.may_begin = may_begin
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.turn.get_loop().call_soon_threadsafe(self._set, may_begin)

    def _set(self, may_begin: bool) -> None:
        if not self.turn.done():
            self.turn.set_result(may_begin)


@dataclass(slots=True)
class _Provider:
    server: Server
    working: int = 0
    waiting: int = 0
    # The waiting requests of each user, in their order.
    lines: dict[int, deque[_Request]] = field(default_factory=dict)
    # What was last said of ``working``, and until when it need not be renewed.
    said: int = 0
    renew_at: float = 0.0

    def add(self, user_id: int, request: _Request) -> None:
        self.lines.setdefault(user_id, deque()).append(request)
        self.waiting += 1

    def remove(self, user_id: int, request: _Request) -> None:
        self.lines[user_id].remove(request)
        self.waiting -= 1
        if not self.lines[user_id]:
            del self.lines[user_id]


class ModelPlaces:
    """``leaving``: whether the process drains; waiting requests then end without a place."""

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        self.id = secrets.token_hex(8)
        self.providers: dict[str, _Provider] = {}
        self._limits = Limits()
        # Guards the counts and lines, which the event loop and the thread change.
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    @contextlib.asynccontextmanager
    async def hold(self, server: Server, user_id: int) -> AsyncIterator[bool]:
        """Hold a place for one request. Waits without a limit; a cancel ends it. False if the process drains, or if the
        catalogue no longer has the provider.
        """
        may_begin = await self._take(server, user_id)
        try:
            yield may_begin
        finally:
            if may_begin:
                self._give_back(server.name)

    def stop(self) -> None:
        """Release all places. Call it when no request is at work."""
        self._stopped = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(timeout=1)

    async def _take(self, server: Server, user_id: int) -> bool:
        request = _Request(asyncio.get_running_loop().create_future())
        with self._lock:
            provider = self.providers.get(server.name) or self._add(server)
            provider.server = server
            if not server.is_limited:
                provider.working += 1
                return True
            provider.add(user_id, request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="run-places", daemon=True)
                self._thread.start()
        self._changed.set()
        try:
            return await request.turn
        except asyncio.CancelledError:
            with self._lock:
                if request.may_begin:  # the place was given in the moment of the cancel
                    provider.working -= 1
                elif request in provider.lines.get(user_id, ()):
                    provider.remove(user_id, request)
            self._changed.set()
            raise

    def _give_back(self, name: str) -> None:
        with self._lock:
            self.providers[name].working -= 1
        self._changed.set()

    def _add(self, server: Server) -> _Provider:
        provider = self.providers[server.name] = _Provider(server)
        metrics.model_requests_open.follow(lambda: provider.working, server.name, "working")
        metrics.model_requests_open.follow(lambda: provider.waiting, server.name, "waiting")
        return provider

    def _run(self) -> None:
        pause = 0.0
        while not self._stopped:
            self._changed.wait(pause)
            self._changed.clear()
            if not self._steps():
                time.sleep(PAUSE_SECONDS)
            time.sleep(GATHER_SECONDS)
            with self._lock:
                waits = any(provider.waiting for provider in self.providers.values())
            lease = limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
            pause = min(limits.MODEL_PLACES_POLL_SECONDS, lease) if waits else lease
            pause *= random.uniform(0.5, 1.0)  # noqa: S311
        self._steps()
        connection.close()

    def _steps(self) -> bool:
        """Ask for places at all providers. False if that was not possible."""
        try:
            for provider in list(self.providers.values()):
                attempt(self._step, provider)
        except CONNECTION_ERRORS as error:
            outage.failed(error)
            return False
        except Exception:
            logger.exception("places at providers could not be asked for; trying again")
            return False
        return True

    def _step(self, provider: _Provider) -> None:
        servers = {model.server.name: model.server for model in catalogue.remembered().models.values()}
        server = servers.get(provider.server.name, provider.server)
        with self._lock:
            if self.leaving() or server.name not in servers:
                self._end_waits(provider)
            if not server.is_limited:
                self._begin(provider, {str(user_id): len(line) for user_id, line in provider.lines.items()})
                return
            waiting = {str(user_id): len(line) for user_id, line in provider.lines.items()}
            demand = Demand(self.id, provider.working, waiting)
        renewed = provider.working and time.monotonic() >= provider.renew_at
        if not (waiting or renewed or demand.working != provider.said):
            return
        begun = time.monotonic()
        granted = self._limits.take(server, demand)
        provider.renew_at = begun + limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
        provider.said = demand.working + sum(granted.values())
        with self._lock:
            self._begin(provider, granted)

    def _begin(self, provider: _Provider, granted: dict[str, int]) -> None:
        """Let requests begin. Some may have been cancelled since they were counted."""
        for user_id, count in granted.items():
            for request in list(provider.lines.get(int(user_id), ()))[:count]:
                provider.remove(int(user_id), request)
                provider.working += 1
                request.answer(True)

    def _end_waits(self, provider: _Provider) -> None:
        for user_id, line in list(provider.lines.items()):
            for request in list(line):
                provider.remove(user_id, request)
                request.answer(False)
