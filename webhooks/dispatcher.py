"""Sends this process's share of the webhooks. One thread claims deliveries and records outcomes, over one connection
that it closes when nothing is due. Attempts run on the event loop of outbound requests, and never touch the database.
"""

import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection

from config.database.retry import CONNECTION_ERRORS, outage
from config.kernel import clock
from config.outbound import client
from config.outbound.loop import raise_open_file_limit, shared
from config.queue import publisher
from config.telemetry import logs
from webhooks import claims, signing, transitions
from webhooks.models import Attempt, Delivery
from webhooks.outbox import DELIVER

logger = logging.getLogger(__name__)

# How long an idle connection is kept, and the pause after a failure of the database.
IDLE_SECONDS = 1.0
PAUSE_SECONDS = 1.0
# Outcomes that arrive within this time are recorded together.
GATHER_SECONDS = 0.005
# A process without a free slot wakes the others at most this often.
PASS_ON_SECONDS = 1.0
# When the process stops: time to record the last outcomes. An attempt whose outcome is not recorded counts as failed.
RECORD_SECONDS = 5.0

# The most bytes of a receiver's answer that are read, and those that are kept, for staff who look into a failure.
WEBHOOK_ANSWER_MAX_BYTES = 64 * 1024
KEPT_BYTES = 1024
ERROR_MAX_CHARS = 200
USER_AGENT = "AgentWorkflowService-Webhooks/1.0"


class Dispatcher:
    """``wake`` has a thread make rounds of the work (``step``) while there is some."""

    def __init__(self) -> None:
        self._outcomes: list[Attempt] = []  # of ended attempts, which are in flight until they are recorded
        self.in_flight = 0
        self._after = ""  # where the search for endpoints continues
        self._passed_on_at = float("-inf")
        self.awake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Have the thread look for due deliveries. Returns at once."""
        with self._lock:
            if self._thread is None and not self._stopping:
                client.prepare()
                raise_open_file_limit()
                self._thread = threading.Thread(target=self._run, name="webhook-dispatcher", daemon=True)
                self._thread.start()
        self.awake.set()

    def stop(self, timeout: float | None = None) -> None:
        """Claim no more deliveries, and wait until the open attempts are recorded, at most ``timeout`` seconds."""
        self._stopping = True
        self.awake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self.in_flight or not self._stopping:
                busy = self.in_flight > 0
                if not self.awake.wait(None if busy or connection.connection is None else IDLE_SECONDS):
                    connection.close()
                    continue
                self.awake.clear()
                if busy:
                    time.sleep(GATHER_SECONDS)
                self._work()
        finally:
            connection.close()

    def _work(self) -> None:
        try:
            while self.step():
                pass
            if outage.ended():
                return
        except CONNECTION_ERRORS as error:
            # Outcomes that are not recorded yet are kept. If their claims lapse before, the attempts count as failed.
            outage.failed(error)
        except Exception:
            logger.exception("the webhook dispatcher failed")
        connection.close()
        time.sleep(PAUSE_SECONDS)
        self.awake.set()

    def step(self) -> bool:
        """Record ended attempts, end waits, claim and start what there is room for. Returns whether more may be due."""
        if ended := self._outcomes.copy():
            self._record(ended)
            del self._outcomes[: len(ended)]
            self.in_flight -= len(ended)
        if self._stopping:
            return False
        passed_on = transitions.pass_on_due()
        found, is_due, self._after = claims.take_ready(self.in_flight, self._after)
        self.in_flight += len(found)
        for delivery in found:
            shared.submit(self._attempt(delivery))
        # The next sweep could wake this process again.
        if is_due and not found and time.monotonic() - self._passed_on_at > PASS_ON_SECONDS:
            self._passed_on_at = time.monotonic()
            publisher.nudge(DELIVER)
        return bool(passed_on or found or self._after)

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

    async def _attempt(self, delivery: Delivery) -> None:
        """Make an attempt on the event loop, and hand over its outcome."""
        # A process that stops returns its claims. So does one that was suspended or slow: a claim must not lapse before
        # the attempt's end.
        ends_at = clock.now() + timedelta(seconds=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS)
        unsent = self._stopping or not delivery.is_claimed_until(ends_at)
        self._outcomes.append(delivery.attempt() if unsent else await attempt(delivery))
        self.awake.set()


async def attempt(delivery: Delivery) -> Attempt:
    """Sign and send a delivery, without the database. Never raises: a failure is an outcome. Sets the context of log
    lines, so it needs a task of its own.
    """
    logs.request_id.set(delivery.request_id or logs.NONE)
    logs.run_id.set(delivery.run_id or logs.NONE)
    logs.task_id.set(delivery.pk)
    # The service's clock: the signed time is independent of the local clock.
    outcome, tick = delivery.attempt(started_at=clock.now()), time.monotonic()
    try:
        answer = await _send(delivery, outcome.started_at)
        kept = answer.body[:KEPT_BYTES].decode("utf-8", "replace").replace("\0", "\ufffd")
        outcome.status_code, outcome.answer = answer.status, kept
    except (client.RequestFailed, client.AddressRefused, ValueError) as failure:
        outcome.error = str(failure)[:ERROR_MAX_CHARS]
    except Exception as failure:
        logger.exception("attempt %s of delivery %s failed unexpectedly", outcome.number, delivery.pk)
        outcome.error = f"Internal error ({type(failure).__name__})."
    outcome.duration_ms = round((time.monotonic() - tick) * 1000)
    if not outcome.succeeded:
        logger.info("attempt %s failed: %s", outcome.number, outcome.error or f"status {outcome.status_code}")
    return outcome


async def _send(delivery: Delivery, now: datetime) -> client.Answer:
    body, endpoint, milliseconds = delivery.body.encode(), delivery.endpoint, int(now.timestamp() * 1000)
    if not endpoint.secret:
        raise client.RequestFailed(
            "The endpoint's secret can't be decrypted; register it with rotateSecret for a new one."
        )
    secrets = list(filter(None, (endpoint.secret, endpoint.secondary_at(now))))
    headers = signing.signed_headers(delivery.event_id, delivery.attempt_count, body, milliseconds, secrets)
    return await client.asend(
        "POST",
        endpoint.url,
        headers={**headers, "Content-Type": "application/json", "User-Agent": USER_AGENT},
        body=body,
        total_timeout=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS,
        max_bytes=WEBHOOK_ANSWER_MAX_BYTES,
        allow_private=settings.OUTBOUND_ALLOW_PRIVATE,
        https_only=not settings.OUTBOUND_ALLOW_PRIVATE,
        reuse=True,
    )


# The dispatcher of this process.
own = Dispatcher()
