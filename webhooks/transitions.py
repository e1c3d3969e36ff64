"""The only writer of a delivery's status, and of what changes with it: the due time, the claim, the attempts.

A delivery is PENDING until an attempt succeeds (DELIVERED), until its fifth attempt fails, until its endpoint is
disabled or deleted, or until too many newer ones wait for its endpoint (all DEAD). A claim counts the attempt, so that
at most five are sent even if no outcome is ever recorded.

Locks are taken endpoint first, then deliveries by id; work in batches skips what is locked. No lock is FOR UPDATE,
because that would block the runs that record events for the endpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import DateTimeField, F, Func
from django.db.models.expressions import Combinable
from django.utils import timezone

from config.database.batches import in_batches
from config.database.protected import ProtectedQuerySet, take_key
from config.kernel import clock
from config.queue.nudges import nudge_after_commit
from webhooks import metrics
from webhooks.models import Delivery, Endpoint
from webhooks.outbox import DELIVER

# Added to an attempt's time limit to get the time at which its claim ends.
WEBHOOK_CLAIM_MARGIN_SECONDS = 15
# Pending deliveries to the installation endpoint; the oldest of more are dropped.
WEBHOOK_INSTALLATION_PENDING_MAX = 200_000
# Pending deliveries per endpoint; the oldest of more are dropped.
WEBHOOK_PENDING_MAX = 10_000

# Seconds from the end of a failed attempt to the next one. The first attempt is made at once.
WAITS = (30, 90, 270, 600)
MAX_ATTEMPTS = len(WAITS) + 1
# The error of an attempt whose process ended before it recorded how the attempt went.
UNKNOWN = "The outcome is not known."

logger = logging.getLogger(__name__)

RETRY = "webhooks.retry_due"
# A late nudge finds its delivery due. An early one would find nothing.
NUDGE_MARGIN = 0.1
_KEY = take_key(Delivery)

_ATTEMPTS = """
    INSERT INTO webhooks_attempt (delivery_id, number, started_at, duration_ms, status_code, error, answer) VALUES
"""
# Rows that a step of the dispatcher changes: it sends nothing meanwhile.
BATCH = 500

# The conditions are literals because a partial index is used for nothing else. Each query asks for the first rows in an
# index's order: without that, a wrong estimate makes the database read the whole table.
_ANYTHING = """
    SELECT
        (
            SELECT next_attempt_at FROM webhooks_delivery WHERE status = 'PENDING' AND ready = false
            ORDER BY next_attempt_at LIMIT 1
        ) <= %s,
        (SELECT 1 FROM webhooks_endpoint WHERE drop_until IS NOT NULL ORDER BY drop_until LIMIT 1)
"""
_DUE = """
    SELECT id FROM webhooks_delivery
    WHERE status = 'PENDING' AND ready = false AND next_attempt_at <= %s ORDER BY next_attempt_at LIMIT %s
"""
_DROPPING = "SELECT id, drop_until FROM webhooks_endpoint WHERE drop_until IS NOT NULL ORDER BY drop_until LIMIT 1"
_DROPPED = """
    SELECT id FROM webhooks_delivery
    WHERE status = 'PENDING' AND ready = {ready} AND endpoint_id = %s AND created_at <= %s
    ORDER BY next_attempt_at LIMIT %s
"""
_FULL = """
    SELECT endpoint.id, CASE WHEN endpoint.user_id IS NULL THEN %s ELSE %s END AS most
    FROM (
        SELECT endpoint_id, count(*) AS pending FROM webhooks_delivery WHERE status = 'PENDING' GROUP BY endpoint_id
    ) AS waiting
    JOIN webhooks_endpoint endpoint ON endpoint.id = waiting.endpoint_id
    WHERE pending > CASE WHEN endpoint.user_id IS NULL THEN %s ELSE %s END
"""
_NEWEST_EXCESS = """
    SELECT id FROM webhooks_delivery WHERE status = 'PENDING' AND endpoint_id = %s ORDER BY id DESC LIMIT 1 OFFSET %s
"""
# A delivery that is being sent is left to its attempt.
_EXCESS = """
    SELECT id FROM webhooks_delivery
    WHERE status = 'PENDING' AND ready = {ready} AND endpoint_id = %s AND id <= %s AND claim_id IS NULL
    ORDER BY next_attempt_at LIMIT %s
"""


@dataclass(frozen=True)
class Outcome:
    """How one attempt went. ``status_code`` and ``error`` exclude each other. ``created_at`` is the delivery's."""

    delivery_id: str
    claim_id: str
    endpoint_id: str
    endpoint_failing: bool | None  # as it was when the attempt was claimed
    number: int
    created_at: datetime
    started_at: datetime
    duration_ms: int
    status_code: int | None
    error: str | None
    answer: str = field(default="", repr=False)
    sent: bool = True  # False if it is certain that nothing was sent

    @property
    def succeeded(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


class _Clock(Func):
    function = "clock_timestamp"
    output_field = DateTimeField()


def database_time(later: float = 0) -> datetime | Combinable:
    """The database's time when a row is written, plus ``later`` seconds. ``clock.now`` may be off by a round trip,
    and no attempt may be early.
    """
    after = timedelta(seconds=later)
    return _Clock() + after if connection.vendor == "postgresql" else timezone.now() + after


def claim(ids: Sequence[str], claim_id: str, lapses_at: datetime) -> None:
    """Count an attempt of each of these deliveries, which the caller has locked, and have it end by ``lapses_at``."""
    Delivery.objects.filter(pk__any_of=ids).update(
        attempt_count=F("attempt_count") + 1, claim_id=claim_id, ready=False, next_attempt_at=lapses_at
    )


def record_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes of these attempts, in a number of statements that does not depend on how many they are.

    An outcome changes nothing if its claim was found lapsed, or if its delivery is finished. An attempt that was not
    sent does not count.
    """
    with transaction.atomic():
        pending = _pending([outcome.delivery_id for outcome in outcomes]).select_for_update(no_key=True).order_by("pk")
        held = dict(pending.values_list("pk", "claim_id"))
        valid = [outcome for outcome in outcomes if held.get(outcome.delivery_id) == outcome.claim_id]
        ended = [outcome for outcome in valid if outcome.sent]
        if returned := [outcome.delivery_id for outcome in valid if not outcome.sent]:
            _pending(returned).update(
                attempt_count=F("attempt_count") - 1, claim_id=None, ready=True, next_attempt_at=database_time()
            )
        died = _end_attempts(ended)
    _count(ended, died)
    _note_health([outcome for outcome in outcomes if outcome.sent])


def _end_attempts(ended: Sequence[Outcome]) -> int:
    """Write what follows from these attempts. Their deliveries are locked. Returns how many of those died."""
    if delivered := [outcome.delivery_id for outcome in ended if outcome.succeeded]:
        _finish(delivered, Delivery.Status.DELIVERED)
    failed: dict[int, list[str]] = {}
    for outcome in ended:
        if not outcome.succeeded:
            failed.setdefault(outcome.number, []).append(outcome.delivery_id)
    for number, ids in failed.items():
        if number >= MAX_ATTEMPTS:
            _finish(ids, Delivery.Status.DEAD)
            continue
        wait = WAITS[number - 1]
        # The time is read after the locks were taken: waiting for a lock must not shorten the wait.
        _pending(ids).update(claim_id=None, next_attempt_at=database_time(wait))
        nudge_after_commit(RETRY, countdown=wait + NUDGE_MARGIN)
    _insert_attempts(ended)
    return len(failed.get(MAX_ATTEMPTS, ()))


def _count(ended: Iterable[Outcome], died: int) -> None:
    """Count attempts that are committed; ``died`` of their deliveries are given up."""
    for one in ended:
        metrics.attempts.inc(f"{one.status_code // 100}xx" if one.status_code else "error")
        if one.number == 1:
            metrics.lag_seconds.observe(max(0.0, (one.started_at - one.created_at).total_seconds()))
    if died:
        metrics.dead.inc(by=died)


def _insert_attempts(ended: Sequence[Outcome]) -> None:
    """In one statement for hundreds of rows: ``bulk_create`` takes longer than all the rest."""
    rows = [
        (
            *(one.delivery_id, one.number, connection.ops.adapt_datetimefield_value(one.started_at)),
            *(one.duration_ms, one.status_code, one.error, one.answer),
        )
        for one in ended
    ]
    if rows:
        with connection.cursor() as cursor:
            marks = ", ".join(["(%s, %s, %s, %s, %s, %s, %s)"] * len(rows))
            cursor.execute(_ATTEMPTS + marks, [value for row in rows for value in row])


def pass_on_due() -> int:
    """Handle a batch of what has become due: waits that are over, claims that lapsed, endpoints that drop deliveries.

    Returns the number of changed rows. One query if there is nothing.
    """
    due, dropping = anything_due()
    return (_end_waits() if due else 0) + (_drop_batch() if dropping else 0)


def anything_due() -> tuple[bool, bool]:
    """Whether a wait is over or a claim has lapsed, and whether an endpoint drops deliveries."""
    with connection.cursor() as cursor:
        cursor.execute(_ANYTHING, [_now()])
        due, dropping = cursor.fetchone()
    return bool(due), bool(dropping)


def _now() -> datetime | str | None:
    return connection.ops.adapt_datetimefield_value(clock.now())


@transaction.atomic
def _end_waits() -> int:
    """Deliveries whose wait is over become ready. A claim that lapsed without an outcome is a failed attempt."""
    with connection.cursor() as cursor:
        cursor.execute(_DUE + _lock(), [_now(), BATCH])
        ids = [key for (key,) in cursor.fetchall()]
    found = Delivery.objects.filter(pk__any_of=ids).values_list(
        "pk", "claim_id", "endpoint_id", "next_attempt_at", "attempt_count", "created_at"
    )
    waited, lapsed = [], []
    hold = timedelta(seconds=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + WEBHOOK_CLAIM_MARGIN_SECONDS)
    for key, claim_id, endpoint_id, lapsed_at, number, created_at in found:
        if claim_id is None:
            waited.append(key)
            continue
        outcome = Outcome(
            delivery_id=key,
            claim_id=claim_id,
            endpoint_id=endpoint_id,
            endpoint_failing=None,
            number=number,
            created_at=created_at,
            started_at=(lapsed_at or clock.now()) - hold,
            duration_ms=round(hold.total_seconds() * 1000),
            status_code=None,
            error=UNKNOWN,
        )
        lapsed.append(outcome)
    if waited:
        _pending(waited).update(ready=True)
    died = _end_attempts(lapsed)
    transaction.on_commit(lambda: _count(lapsed, died))
    return len(waited) + len(lapsed)


def drop(endpoint_ids: Iterable[str]) -> None:
    """Have the pending deliveries of these endpoints marked dead, in batches by ``pass_on_due``.

    Until that is done, nothing is sent to these endpoints.
    """
    with transaction.atomic():
        rows = Endpoint.objects.select_for_update(no_key=True).filter(pk__any_of=list(endpoint_ids)).order_by("pk")
        Endpoint.objects.filter(pk__any_of=list(rows.values_list("pk", flat=True))).update(drop_until=clock.now())
        nudge_after_commit(DELIVER)


@transaction.atomic
def _drop_batch() -> int:
    """Mark a batch of dropped deliveries dead. When none is left, their endpoint is free again."""
    with connection.cursor() as cursor:
        cursor.execute(_DROPPING + _lock())
        row = cursor.fetchone()
    if row is None:
        return 0
    ids = _of_endpoint(_DROPPED, row)
    _finish(ids, Delivery.Status.DEAD)
    transaction.on_commit(lambda: metrics.dropped.inc("endpoint", by=len(ids)))
    if len(ids) < BATCH and not _of_endpoint(_DROPPED, row, lock=False):
        return len(ids) + Endpoint.objects.filter(pk=row[0]).update(drop_until=None)
    return len(ids)


def drop_excess() -> int:
    """Mark the oldest deliveries dead that wait for endpoints with more than WEBHOOK_PENDING_MAX, or for the
    installation endpoint with more than WEBHOOK_INSTALLATION_PENDING_MAX. Returns how many.
    """
    limits = [WEBHOOK_INSTALLATION_PENDING_MAX, WEBHOOK_PENDING_MAX]
    with connection.cursor() as cursor:
        cursor.execute(_FULL, limits * 2)
        full = cursor.fetchall()
        total = 0
        for endpoint_id, most in full:
            cursor.execute(_NEWEST_EXCESS, [endpoint_id, most])
            if newest := cursor.fetchone():
                dropped = in_batches(partial(_drop_excess_batch, endpoint_id, newest[0]))
                logger.warning("endpoint %s has too many pending deliveries: %s are dropped", endpoint_id, dropped)
                total += dropped
    return total


@transaction.atomic
def _drop_excess_batch(endpoint_id: str, newest: str) -> int:
    done = _finish(_of_endpoint(_EXCESS, [endpoint_id, newest]), Delivery.Status.DEAD)
    transaction.on_commit(lambda: metrics.dropped.inc("excess", by=done))
    return done


def _of_endpoint(sql: str, parameters: Sequence[Any], *, lock: bool = True) -> list[str]:
    """The ids of at most BATCH rows, locked unless ``lock`` is false."""
    ids: list[str] = []
    with connection.cursor() as cursor:
        for ready in ("true", "false"):
            if left := BATCH - len(ids):
                cursor.execute(sql.format(ready=ready) + (_lock() if lock else ""), [*parameters, left])
                ids += [key for (key,) in cursor.fetchall()]
    return ids


def _lock() -> str:
    """Lock the rows that a query finds, and skip those that another transaction has locked."""
    return " FOR NO KEY UPDATE SKIP LOCKED" if connection.features.has_select_for_update_skip_locked else ""


def _pending(ids: Sequence[str]) -> ProtectedQuerySet[Delivery]:
    return Delivery.objects.filter(pk__any_of=ids, status=Delivery.Status.PENDING)


def _finish(ids: Sequence[str], status: Delivery.Status) -> int:
    return _pending(ids).change(
        _KEY,
        status=status,
        next_attempt_at=None,
        claim_id=None,
        finished_at=database_time(),
    )


def _note_health(outcomes: Iterable[Outcome]) -> None:
    """Write for each endpoint whether its latest attempt failed, if that differs from before.

    After the deliveries' transaction: claims lock endpoints before deliveries.
    """
    changed: dict[bool, list[str]] = {}
    for outcome in {outcome.endpoint_id: outcome for outcome in outcomes}.values():
        if outcome.endpoint_failing is None or outcome.endpoint_failing == outcome.succeeded:
            changed.setdefault(not outcome.succeeded, []).append(outcome.endpoint_id)
    for failing, ids in changed.items():
        with transaction.atomic():
            # Locked by id: another process may be changing some of these endpoints.
            known = (
                Endpoint.objects.select_for_update(no_key=True)
                .filter(pk__any_of=ids)
                .order_by("pk")
                .values_list("pk", flat=True)
            )
            Endpoint.objects.filter(pk__any_of=list(known)).update(failing=failing)
