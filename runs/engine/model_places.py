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
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from django.db import connection

from config.database.retry import CONNECTION_ERRORS, attempt, outage
from runs import catalogue, metrics
from runs.catalogue.providers import Server
from runs.llm import limits
from runs.llm.limits import Demand

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
# Changes within this time are stated together.
GATHER_SECONDS = 0.005
# After an error.
PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class _Provider:
    server: Server
    working: int = 0
    # The turns of each user's waiting requests, in their order. A turn ends with whether the request may begin.
    lines: dict[int, list[asyncio.Future[bool]]] = field(default_factory=dict)
    # What was last said of ``working``, and until when it need not be renewed.
    said: int = 0
    renew_at: float = 0.0

    @property
    def waiting(self) -> int:
        return sum(map(len, list(self.lines.values())))


class ModelPlaces:
    """``leaving``: whether the process drains; waiting requests then end without a place."""

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        self.id = secrets.token_hex(8)
        self.providers: dict[str, _Provider] = {}
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
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with self._lock:
            provider = self.providers.get(server.name) or self._add(server)
            provider.server = server
            if not server.is_limited:
                provider.working += 1
                return True
            provider.lines.setdefault(user_id, []).append(turn)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="run-places", daemon=True)
                self._thread.start()
        self._changed.set()
        try:
            return await turn
        except asyncio.CancelledError:
            with self._lock:
                if turn in provider.lines.get(user_id, ()):
                    provider.lines[user_id].remove(turn)
            if not turn.cancelled() and turn.result():  # the place was given in the moment of the cancel
                self._give_back(server.name)
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
            waits = any(provider.waiting for provider in list(self.providers.values()))
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
                self._answer(provider, dict.fromkeys(provider.lines), may_begin=False)
            provider.lines = {user_id: line for user_id, line in provider.lines.items() if line}
            waiting = {str(user_id): len(line) for user_id, line in provider.lines.items()}
            if not server.is_limited:
                self._answer(provider, dict.fromkeys(provider.lines))
                return
            demand = Demand(self.id, provider.working, waiting)
        renewed = provider.working and time.monotonic() >= provider.renew_at
        if not (waiting or renewed or demand.working != provider.said):
            return
        begun = time.monotonic()
        granted = limits.take(server, demand)
        provider.renew_at = begun + limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
        provider.said = demand.working + sum(granted.values())
        with self._lock:
            self._answer(provider, {int(user_id): count for user_id, count in granted.items()})

    def _answer(self, provider: _Provider, counts: Mapping[int, int | None], *, may_begin: bool = True) -> None:
        """End so many waits of each user, or all. Some may have been cancelled since they were counted."""
        for user_id, count in counts.items():
            line = provider.lines.get(user_id, [])
            begun = line[:count]
            del line[:count]
            for turn in begun:
                provider.working += may_begin
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    turn.get_loop().call_soon_threadsafe(self._end, provider.server.name, turn, may_begin)

    def _end(self, name: str, turn: asyncio.Future[bool], may_begin: bool) -> None:
        if not turn.done():
            turn.set_result(may_begin)
        elif may_begin:  # cancelled meanwhile
            self._give_back(name)
