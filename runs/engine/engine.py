"""The engine of a run worker process: one event loop that carries all its runs.

A run that waits on a model or a tool costs a coroutine, no thread and no database connection. Database steps run on a
few threads, each with a connection of its own, blocking tools on others. The heart, a thread too, renews the lease of
all runs at once, learns of cancels and losses, and looks for work that no message told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection, models

from config.database.queries import CompiledQuery
from config.kernel import clock
from config.outbound.loop import allow_files
from config.telemetry import logs, tracing
from runs import catalogue
from runs.engine import journal
from runs.engine.loop import RunLoop
from runs.engine.text import TextFlusher
from runs.lifecycle import runs, sweeps
from runs.lifecycle.moves import LeaseLost
from runs.llm.registry import aclose_all, preload
from runs.models import Run, RunStatus, Worker

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

BEATS_PER_LEASE = 5
CLOCK_SYNC_SECONDS = 10.0
RETRY_SECONDS_MAX = 2.0
# For handing over what the grace time has left. With it a shutdown ends within 30 s, after which platforms kill.
CLOSE_SECONDS = 10.0
HAND_OVER_ROUNDS = 3
# PostgreSQL ended the connection since this process was suspended in a transaction: DATABASE_IDLE_TRANSACTION_SECONDS.
# To Django that is an InternalError.
IDLE_TOO_LONG = "25P03"


class Engine:
    """Start it once a process, ``offer`` it run ids from any thread, ``stop`` it."""

    def __init__(self) -> None:
        self.worker_id = ""
        self.loops: dict[str, RunLoop] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.draining = False
        # Until when, by the monotonic clock, the lease holds for sure.
        self.lease_until = 0.0
        self.db_threads = ThreadPoolExecutor(settings.RUN_WORKER_DB_THREADS, "run-db")
        self.tool_threads = ThreadPoolExecutor(settings.RUN_WORKER_TOOL_THREADS, "run-tool")
        self.loop = asyncio.new_event_loop()
        self.flusher: TextFlusher
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_loop, name="run-loop", daemon=True),
            threading.Thread(target=self._run_heart, name="run-heart", daemon=True),
        ]

    # --- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        preload()
        allow_files(settings.RUN_WORKER_CAPACITY * 2)  # a run that waits on a model holds a socket
        self._register()
        catalogue.refresh()
        connection.close()
        for thread in self._threads:
            thread.start()

    def offer(self, run_id: str) -> None:
        """Take the run if it can be had. A run that does not fit here stays queued, and whoever has room finds it."""
        if not self._stopped.is_set():
            self.loop.call_soon_threadsafe(self._admit, run_id)

    def drain(self) -> None:
        """Take nothing more, and hand each run over at its next step. Safe in a signal handler."""
        self.draining = True

    def stop(self, grace_seconds: float) -> None:
        """Drain for so long, then hand over what is left. Blocks."""
        self.drain()
        end = time.monotonic() + grace_seconds
        while self.tasks and time.monotonic() < end:
            time.sleep(0.05)
        self._stopped.set()
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(timeout=CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        for thread in self._threads:
            thread.join(timeout=1)
        self.db_threads.shutdown(wait=True, cancel_futures=True)
        self.tool_threads.shutdown(wait=False, cancel_futures=True)

    # --- on the loop -------------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.flusher = TextFlusher(self)
        flushing = self.loop.create_task(self.flusher.run())
        self.loop.run_forever()
        flushing.cancel()
        self.loop.run_until_complete(asyncio.gather(flushing, return_exceptions=True))
        self.loop.close()

    def _admit(self, run_id: str) -> None:
        if self.draining or run_id in self.tasks or len(self.tasks) >= settings.RUN_WORKER_CAPACITY:
            return
        self.tasks[run_id] = self.loop.create_task(self._carry(run_id), name=run_id)

    async def _carry(self, run_id: str) -> None:
        logs.run_id.set(run_id)
        try:
            found = await self.db(claim_and_load, run_id, self.worker_id)
            if found is not None:
                self.loops[run_id] = RunLoop(self, found)
                parent = tracing.continuing(found.run.trace_parent)
                with tracing.span("run", parent=parent, **{"run.id": run_id}):
                    await self.loops[run_id].carry()
        except asyncio.CancelledError:
            pass  # lost or shut down: nothing may be written any more
        except Exception:
            logger.exception("run %s could not be carried", run_id)
        finally:
            self.loops.pop(run_id, None)
            self.tasks.pop(run_id, None)

    async def db(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a database step on a thread. It is never abandoned half-way, and repeated while the database is away.

        A step that fails leaves the rows it was given as they were.
        """
        delay = 0.05
        while True:
            # The thread logs under this run's request id.
            attempt = partial(contextvars.copy_context().run, _attempt, step, args, kwargs)
            future = self.loop.run_in_executor(self.db_threads, attempt)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await asyncio.wait([future])
                if not future.cancelled():
                    future.exception()
                raise
            except (OperationalError, InterfaceError) as error:
                logger.warning("the database did not answer (%s); trying again", type(error).__name__)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311
            delay = min(delay * 2, RETRY_SECONDS_MAX)

    def lose(self, run_id: str) -> None:
        """The run is another's: stop without a word."""
        if run_id in self.loops:
            self.loops[run_id].lost = True
        if run_id in self.tasks:
            self.tasks[run_id].cancel()

    def _cancel(self, run_ids: list[str]) -> None:
        for run_id in run_ids:
            if (loop := self.loops.get(run_id)) and not loop.cancel_requested:
                loop.cancel_requested = True
                self.tasks[run_id].cancel()

    def _lose_all(self) -> None:
        for run_id in list(self.tasks):
            self.lose(run_id)

    async def _close(self) -> None:
        """What the grace time did not end is handed over as it stands."""
        tasks = list(self.tasks.values())
        self._lose_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.db(hand_over_all, self.worker_id)
        await self.db(unregister, self.worker_id)
        await aclose_all()

    # --- the heart ---------------------------------------------------------------------------------------------------

    def _run_heart(self) -> None:
        # The task of what no message leads to: the heart's own lines, and the runs that it finds.
        logs.task_id.set(self.worker_id)
        beat_every = settings.RUN_LEASE_SECONDS / BEATS_PER_LEASE
        # Spread over the processes, which all look for the same work.
        sweep_every = settings.RUN_SWEEP_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311
        due = {self._beat: beat_every, self._sweep: sweep_every, self._refresh: catalogue.MAX_AGE_SECONDS}
        next_at = dict.fromkeys(due, 0.0)
        while not self._stopped.wait(settings.RUN_CANCEL_POLL_SECONDS):
            try:
                for work, every in due.items():
                    if time.monotonic() >= next_at[work]:
                        work()
                        next_at[work] = time.monotonic() + every
                self._look_for_cancels()
            except (OperationalError, InterfaceError) as error:
                connection.close()
                logger.warning("the heart's database did not answer (%s); trying again", type(error).__name__)
            except Exception:
                connection.close()
                logger.exception("the heart missed a beat")
        connection.close()

    def lease_may_have_lapsed(self) -> bool:
        """Whether this process was suspended or without its database for so long that others may have its runs."""
        return time.monotonic() > self.lease_until

    def _register(self) -> None:
        begun = time.monotonic()
        self.worker_id = register()
        self.lease_until = begun + settings.RUN_LEASE_SECONDS

    def _beat(self) -> None:
        begun = time.monotonic()
        if beat(self.worker_id):
            self.lease_until = begun + settings.RUN_LEASE_SECONDS
            return
        # Another process saw the lease expire and has given the runs away.
        logger.warning("this worker's lease was lost; its %d runs go on elsewhere", len(self.tasks))
        # A new lease begins only once all is dropped that was begun under the old one: it would vouch for that too.
        self.lease_until = 0.0
        dropped = threading.Event()
        self.loop.call_soon_threadsafe(self._lose_all)
        self.loop.call_soon_threadsafe(dropped.set)
        while not dropped.wait(1.0):
            if self._stopped.is_set():
                return
        self._register()
        logs.task_id.set(self.worker_id)

    def _sweep(self) -> None:
        sweeps.reap_workers()
        if dropped := sweeps.drop_uncarried(self.worker_id, self.tasks, self._stopped.is_set):
            logger.warning("%d runs that nothing here carried are up for takeover", len(dropped))
        free = settings.RUN_WORKER_CAPACITY - len(self.tasks)
        if not self.draining and free > 0:
            for run_id in sweeps.due_runs(free):
                self.offer(run_id)

    def _refresh(self) -> None:
        clock.sync()
        catalogue.refresh()

    def _look_for_cancels(self) -> None:
        cancelled = [run.pk for run in _to_cancel(self.worker_id)]
        if cancelled:
            self.loop.call_soon_threadsafe(self._cancel, cancelled)


# Asked several times a second by every process.
_to_cancel: CompiledQuery[Run] = CompiledQuery(
    lambda worker_id: Run.objects.filter(
        worker_id=worker_id, status=RunStatus.RUNNING, cancel_requested_at__isnull=False
    ).only("pk"),
    str,
)


def claim_and_load(run_id: str, worker_id: str) -> journal.Journal | None:
    run = runs.claim(run_id, worker_id)
    if run is None:
        return None
    fresh = run.lease_token == 1
    found = journal.load(run, fresh=fresh)
    if fresh:
        found.asked, found.refused = True, journal.refusal(run, 0, available=vars(run)["available"])
    return found


def register() -> str:
    """A new worker row. Returns its id."""
    worker = Worker(host=socket.gethostname()[:255], pid=os.getpid(), expires_at=_lease_end())
    worker.save(force_insert=True)
    return worker.pk


def beat(worker_id: str) -> bool:
    """Renew the lease of all the worker's runs; False if it was lost."""
    return bool(Worker.objects.filter(pk=worker_id).update(expires_at=_lease_end()))


def hand_over_all(worker_id: str) -> None:
    """As the database has them: what a loop remembers may lack a commit whose answer was lost."""
    owned = Run.objects.filter(worker_id=worker_id, status=RunStatus.RUNNING)
    for _ in range(HAND_OVER_ROUNDS):
        for run in owned:
            # Text that was on its way may have been written since the run was read: once more, as it is then.
            with contextlib.suppress(LeaseLost):
                runs.hand_over(run)
        owned = owned.all()
    for run_id in owned.values_list("pk", flat=True):
        logger.warning("run %s was not handed over; its lease will expire", run_id)


def unregister(worker_id: str) -> None:
    """Only once no run is owned any more: what is, stays to be found by its expired lease."""
    if not Run.objects.filter(worker_id=worker_id, status=RunStatus.RUNNING).exists():
        Worker.objects.filter(pk=worker_id).delete()


def _lease_end() -> Any:
    return clock.now() + timedelta(seconds=settings.RUN_LEASE_SECONDS)


def _attempt(step: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """One try of a step; if it fails, the rows it was given are put back as they were."""
    before = [(row, copy.copy(row.__dict__), row._state.adding) for row in _rows(args)]
    try:
        return step(*args, **kwargs)
    except BaseException as error:
        for row, attributes, adding in before:
            row.__dict__.clear()
            row.__dict__.update(attributes)
            row._state.adding = adding
        if getattr(error.__cause__, "sqlstate", None) == IDLE_TOO_LONG:
            error = OperationalError(*error.args)
        if isinstance(error, (OperationalError, InterfaceError)):
            connection.close()
        raise error


def _rows(values: Any) -> Iterator[models.Model]:
    for value in values:
        if isinstance(value, models.Model):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _rows(value)
