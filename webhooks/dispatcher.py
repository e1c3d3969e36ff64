"""The process's one sender of webhooks: claims what is due, sends it side by side, records what became of it.

One thread talks to the database (one connection a process, given back when there is nothing to do); attempts, at most
WEBHOOK_WORKER_CAPACITY of them, run on the process's loop of outbound requests and only talk to receivers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from django.conf import settings
from django.db import DatabaseError, InterfaceError, OperationalError, connection

from config.outbound.loop import allow_files, shared
from config.queue import nudges
from webhooks import claims, sender, transitions
from webhooks.outbox import DELIVER
from webhooks.outcomes import Outcome

logger = logging.getLogger(__name__)

# How long the connection is kept with nothing to do, and the pause after the database failed.
IDLE_SECONDS = 1.0
PAUSE_SECONDS = 1.0
# Outcomes that come within so long of one another are recorded together.
GATHER_SECONDS = 0.005
# A process without room tells the others of due deliveries at most so often.
PASS_ON_SECONDS = 1.0
# An attempt's connection, and others that are kept for a moment after theirs.
FILES_PER_ATTEMPT = 4
# At the process's end, for recording what the last attempts gave. What is not recorded is sent again.
RECORD_SECONDS = 5.0


class Dispatcher:
    """``wake`` is all that a running service calls; ``drain`` does the same work in the calling thread, to its end."""

    def __init__(self) -> None:
        allow_files(settings.WEBHOOK_WORKER_CAPACITY * FILES_PER_ATTEMPT)
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._unrecorded: list[Outcome] = []
        self._in_flight = 0
        self._passed_on = 0.0
        self._awake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Something may be due. Returns at once."""
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="webhook-dispatcher", daemon=True)
                self._thread.start()
        self._awake.set()

    def stop(self, timeout: float | None = None) -> None:
        """Claim nothing more and wait until what is under way is recorded, ``timeout`` seconds at most."""
        self._stopping = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def drain(self) -> None:
        """Send everything that is due and record it, then return."""
        while self._step() or self._in_flight:
            self._awake.wait(None if self._in_flight else 0)
            self._awake.clear()

    def _run(self) -> None:
        try:
            while not (self._stopping and self._in_flight == 0 and not self._unrecorded):
                busy = self._in_flight > 0
                if not self._awake.wait(None if busy or connection.connection is None else IDLE_SECONDS):
                    connection.close()
                    continue
                self._awake.clear()
                if busy:
                    time.sleep(GATHER_SECONDS)
                self._work()
        finally:
            connection.close()

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except (DatabaseError, InterfaceError) as error:
            # What was not recorded is kept for later; if its claim lapses first, the attempt is repeated.
            logger.warning("webhooks wait for the database (%s)", type(error).__name__)
            self._recover()
        except Exception:
            logger.exception("sending webhooks broke")
            self._recover()

    def _recover(self) -> None:
        connection.close()
        time.sleep(PAUSE_SECONDS)
        self._awake.set()

    def _step(self) -> bool:
        """Record what has come back, claim and start what fits. Whether anything was started."""
        self._gather()
        if self._unrecorded:
            self._record()
        if self._stopping:
            return False
        found, left = claims.take_due(self._in_flight)
        if found:
            self._in_flight += len(found)
            shared.submit(self._send(found))
        if left and not found:
            self._pass_on()
        return bool(found)

    def _record(self) -> None:
        try:
            transitions.record_outcomes(self._unrecorded)
        except (OperationalError, InterfaceError):
            raise
        except Exception:
            # Trying the same again would stop everything else; these claims lapse, and their attempts are repeated.
            logger.exception("the outcomes of %s attempts were not recorded", len(self._unrecorded))
        self._unrecorded = []

    async def _send(self, batch: Sequence[claims.Claim]) -> None:
        """On the loop: these attempts side by side, each handed back as it ends."""
        await asyncio.gather(*(self._attempt(claim) for claim in batch))

    async def _attempt(self, claim: claims.Claim) -> None:
        self._outcomes.put(await sender.attempt(claim))
        self._awake.set()

    def _gather(self) -> None:
        while True:
            try:
                self._unrecorded.append(self._outcomes.get_nowait())
            except Empty:
                return
            self._in_flight -= 1

    def _pass_on(self) -> None:
        """This process is full; another may have room."""
        if time.monotonic() - self._passed_on > PASS_ON_SECONDS:
            self._passed_on = time.monotonic()
            nudges.nudge(DELIVER)


_dispatcher: Dispatcher | None = None
_owner = 0
_lock = threading.Lock()


def dispatcher() -> Dispatcher:
    """This process's dispatcher; a forked child has its own."""
    global _dispatcher, _owner
    with _lock:
        if _dispatcher is None or _owner != os.getpid():
            _dispatcher, _owner = Dispatcher(), os.getpid()
        return _dispatcher


def stop() -> None:
    """At the process's end: let what is under way finish, for no longer than an attempt may take."""
    if _dispatcher is not None and _owner == os.getpid():
        _dispatcher.stop(settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + RECORD_SECONDS)
