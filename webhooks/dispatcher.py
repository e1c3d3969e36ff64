"""Sends this process's share of the webhooks: claims due deliveries, sends them concurrently, and records the outcomes.

One thread uses the database, over one connection that it closes when nothing is due. At most WEBHOOK_WORKER_CAPACITY
attempts run on the event loop of outbound requests; they never touch the database.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

from django.conf import settings
from django.db import connection

from config.database.retry import CONNECTION_ERRORS, outage
from config.outbound import client
from config.outbound.loop import raise_open_file_limit, shared
from config.queue import nudges
from webhooks import claims, sender, transitions
from webhooks.models import Attempt
from webhooks.outbox import DELIVER

logger = logging.getLogger(__name__)

# How long an idle connection is kept, and the pause after a failure of the database.
IDLE_SECONDS = 1.0
PAUSE_SECONDS = 1.0
# Outcomes that arrive within this time are recorded together.
GATHER_SECONDS = 0.005
# A process without free slots nudges the others at most this often.
PASS_ON_SECONDS = 1.0
# When the process stops: time to record the last outcomes. An attempt whose outcome is not recorded counts as failed.
RECORD_SECONDS = 5.0


class Dispatcher:
    """``wake`` is for the service. ``drain`` does the same work in the calling thread, until nothing is due."""

    def __init__(self) -> None:
        client.prepare()
        raise_open_file_limit()
        self._outcomes: SimpleQueue[Attempt] = SimpleQueue()
        self._unrecorded: list[Attempt] = []
        self._in_flight = 0
        self._after = ""  # where the search for endpoints continues
        self._nudged_at = 0.0
        self._awake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Have the thread look for due deliveries. Returns at once."""
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="webhook-dispatcher", daemon=True)
                self._thread.start()
        self._awake.set()

    def stop(self, timeout: float | None = None) -> None:
        """Claim no more deliveries, and wait until the open attempts are recorded, at most ``timeout`` seconds."""
        self._stopping = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def drain(self) -> None:
        """Send and record everything that is due, then return."""
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
            if not outage.ended():
                self._recover()
        except CONNECTION_ERRORS as error:
            # Outcomes that are not recorded yet are kept. If their claims lapse before, the attempts count as failed.
            outage.failed(error)
            self._recover()
        except Exception:
            logger.exception("the webhook dispatcher failed")
            self._recover()

    def _recover(self) -> None:
        connection.close()
        time.sleep(PAUSE_SECONDS)
        self._awake.set()

    def _step(self) -> bool:
        """Record ended attempts, end waits, claim and start what there is room for. Returns whether more may be due."""
        while not self._outcomes.empty():
            self._unrecorded.append(self._outcomes.get())
            self._in_flight -= 1
        if self._unrecorded:
            self._record(self._unrecorded)
            self._unrecorded = []
        if self._stopping:
            return False
        passed_on = transitions.pass_on_due()
        found: list[claims.Claim] = []
        if self._in_flight < claims.WEBHOOK_WORKER_CAPACITY:
            found, left, self._after = claims.take_ready(self._in_flight, self._after)
            more = bool(found or self._after)
        else:
            left, more = claims.anything_ready(), False
        if found:
            self._in_flight += len(found)
            shared.submit(self._send(found))
        if left and not found and time.monotonic() - self._nudged_at > PASS_ON_SECONDS:
            # Nudge the other processes, because this one has no free slot.
            self._nudged_at = time.monotonic()
            nudges.nudge(DELIVER)
        return more or bool(passed_on)

    def _record(self, outcomes: Sequence[Attempt]) -> None:
        """Record outcomes. If one cannot be written, the others are written. Its claim lapses, so its attempt counts as
        failed; retrying would block all other deliveries.
        """
        try:
            transitions.record_outcomes(outcomes)
        except CONNECTION_ERRORS:
            raise
        except Exception:
            if len(outcomes) == 1:
                logger.exception("the outcome of an attempt of delivery %s was not recorded", outcomes[0].delivery.pk)
                return
            for outcome in outcomes:
                self._record([outcome])

    async def _send(self, batch: Sequence[claims.Claim]) -> None:
        """Make these attempts concurrently on the event loop, and hand over each outcome when it arrives."""
        await asyncio.gather(*(self._attempt(claim) for claim in batch))

    async def _attempt(self, claim: claims.Claim) -> None:
        # A process that stops returns its claims. So does one that was suspended: its claims may lapse meanwhile.
        unsent = self._stopping or claim.is_late()
        self._outcomes.put(claim.delivery.attempt() if unsent else await sender.attempt(claim))
        self._awake.set()


_dispatcher: Dispatcher | None = None
_lock = threading.Lock()


def dispatcher() -> Dispatcher:
    """The dispatcher of this process."""
    global _dispatcher
    with _lock:
        _dispatcher = _dispatcher or Dispatcher()
        return _dispatcher


def stop() -> None:
    """Called when the process stops: wait for the open attempts, at most as long as an attempt may take."""
    if _dispatcher is not None:
        _dispatcher.stop(settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + RECORD_SECONDS)
