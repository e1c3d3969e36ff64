"""The requests of a process to models: those that are being made, and those that wait for a place at a provider with
limits, each as a future. One thread asks for the places of all: at once when something changed, otherwise at intervals.
It also renews the places that the process holds.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from config.database.retry import CONNECTION_ERRORS, attempt, outage
from runs import catalogue, metrics
from runs.catalogue.providers import Server
from runs.llm import limits
from runs.llm.limits import Demand

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
# Changes within this time are reported together.
GATHER_SECONDS = 0.005
# After an error.
PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class _Provider:
    server: Server
    working: int = 0
    # The futures of each user's waiting requests, in order. The result says whether the request may begin.
    lines: dict[int, list[asyncio.Future[bool]]] = field(default_factory=dict)
    # The number of places that was last reported, and until when it need not be renewed (``time.monotonic``).
    said: int = 0
    renew_at: float = 0.0

    @property
    def waiting(self) -> int:
        return sum(map(len, list(self.lines.values())))  # metrics are read on other threads


class ModelPlaces:
    """For the engine's event loop. ``leaving``: whether the process drains; waiting requests then end without a
    place.
    """

    def __init__(self, leaving: Callable[[], bool]) -> None:
        self.leaving = leaving
        self.id = secrets.token_hex(8)
        self.providers: dict[str, _Provider] = {}
        # A thread of its own, because all processes wait for the provider's row; steps of runs must not wait with it.
        self.thread = ThreadPoolExecutor(1, "run-places")
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, server: Server, user_id: int) -> AsyncIterator[bool]:
        """Hold a place for one request. The wait has no time limit; a cancel ends it. Yields False, without a place, if
        the process drains or the catalogue no longer has the provider.
        """
        provider = self.providers.get(server.name) or self._add(server)
        provider.server = server
        may_begin = await self._take(provider, user_id)
        try:
            yield may_begin
        finally:
            if may_begin:
                self._give_back(provider)

    async def _take(self, provider: _Provider, user_id: int) -> bool:
        if not provider.server.is_limited:
            provider.working += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line = provider.lines.setdefault(user_id, [])
        line.append(turn)
        self._changed.set()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in line:
                line.remove(turn)
            elif not turn.cancelled() and turn.result():  # the place came at the moment of the cancel
                self._give_back(provider)
            self._changed.set()
            raise

    def _give_back(self, provider: _Provider) -> None:
        provider.working -= 1
        self._changed.set()

    def _add(self, server: Server) -> _Provider:
        provider = self.providers[server.name] = _Provider(server)
        metrics.model_requests_open.labels(server.name, "working").set_function(lambda: provider.working)
        metrics.model_requests_open.labels(server.name, "waiting").set_function(lambda: provider.waiting)
        return provider

    async def run(self) -> None:
        while True:
            waits = any(provider.waiting for provider in self.providers.values())
            lease = limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
            pause = min(limits.MODEL_PLACES_POLL_SECONDS, lease) if waits else lease
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):  # noqa: S311
                    await self._changed.wait()
            self._changed.clear()
            if not await self.ask():
                await asyncio.sleep(PAUSE_SECONDS)
            await asyncio.sleep(GATHER_SECONDS)

    async def ask(self) -> bool:
        """Ask for places at all providers, and give free ones back. False if the database could not be asked."""
        try:
            for provider in list(self.providers.values()):
                await self._ask(provider)
        except CONNECTION_ERRORS as error:
            outage.failed(error)
            return False
        except Exception:
            logger.exception("places at providers could not be asked for; trying again")
            return False
        return True

    async def _ask(self, provider: _Provider) -> None:
        servers = {model.server.name: model.server for model in catalogue.remembered().models.values()}
        server = servers.get(provider.server.name, provider.server)
        if self.leaving() or server.name not in servers:
            self._answer(provider, dict.fromkeys(provider.lines), may_begin=False)
        provider.lines = {user_id: line for user_id, line in provider.lines.items() if line}
        if not server.is_limited:
            self._answer(provider, dict.fromkeys(provider.lines))
            return
        waiting = {str(user_id): len(line) for user_id, line in provider.lines.items()}
        demand = Demand(self.id, provider.working, waiting)
        begun = time.monotonic()
        renews = provider.working and begun >= provider.renew_at
        if not (waiting or renews or demand.working != provider.said):
            return
        take = asyncio.get_running_loop().run_in_executor(self.thread, attempt, limits.take, server, demand)
        granted = await take
        provider.renew_at = begun + limits.MODEL_PLACES_LEASE_SECONDS / RENEWALS_PER_LEASE
        provider.said = demand.working + sum(granted.values())
        self._answer(provider, {int(user_id): count for user_id, count in granted.items()})

    def _answer(self, provider: _Provider, counts: Mapping[int, int | None], *, may_begin: bool = True) -> None:
        """End this number of each user's waits; None means all. Some may have been cancelled meanwhile."""
        for user_id, count in counts.items():
            line = provider.lines.get(user_id, [])
            begun = line[:count]
            del line[:count]
            for turn in begun:
                if not turn.done():
                    turn.set_result(may_begin)
                    provider.working += may_begin
