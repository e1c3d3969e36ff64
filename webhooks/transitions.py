"""The only writer of a delivery's status, and of what goes with it: the due time, the claim, the attempts.

A delivery is PENDING until an attempt succeeds (DELIVERED), or its fifth fails, or its endpoint is disabled or
deleted (both DEAD).
Locks are taken endpoint first, then deliveries by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import DateTimeField, F, Func, QuerySet
from django.db.models.expressions import Combinable
from django.utils import timezone

from config.queue.nudges import nudge_after_commit
from webhooks import metrics
from webhooks.models import Delivery, Endpoint

# Seconds from the end of the failed attempt to the next one; the first is made at once.
WAITS = (30, 90, 270, 600)
MAX_ATTEMPTS = len(WAITS) + 1
RETRY = "webhooks.retry_due"
# A nudge that comes a little late finds its delivery due; one that comes early would be for nothing.
NUDGE_MARGIN = 0.1

_ATTEMPT = """
    INSERT INTO webhooks_attempt (delivery_id, number, started_at, duration_ms, status_code, error, answer)
    VALUES (%s, %s, %s, %s, %s, %s, %s)
"""
_ATTEMPTS_OF_COLUMNS = """
    INSERT INTO webhooks_attempt (delivery_id, number, started_at, duration_ms, status_code, error, answer)
    SELECT * FROM unnest(
        %s::varchar[], %s::smallint[], %s::timestamptz[], %s::integer[], %s::smallint[], %s::varchar[], %s::text[]
    )
"""


def succeeded(status_code: int | None) -> bool:
    return status_code is not None and 200 <= status_code < 300


@dataclass(frozen=True)
class Outcome:
    """How one attempt went. ``status_code`` and ``error`` exclude each other."""

    delivery_id: str
    claim_id: str
    endpoint_id: str
    endpoint_failing: bool | None  # as it was when the attempt was claimed
    started_at: datetime
    duration_ms: int
    status_code: int | None
    error: str | None
    answer: str = field(default="", repr=False)

    @property
    def succeeded(self) -> bool:
        return succeeded(self.status_code)


@dataclass(frozen=True)
class Made:
    """An attempt that is recorded: ``created_at`` is its delivery's."""

    outcome: Outcome
    number: int
    created_at: datetime


class _Clock(Func):
    function = "clock_timestamp"
    output_field = DateTimeField()


def database_time(later: float = 0) -> datetime | Combinable:
    """The database's time when a row is written, and ``later`` seconds. ``clock.now`` may be off by a round trip, and
    no attempt may be early.
    """
    after = timedelta(seconds=later)
    return _Clock() + after if connection.vendor == "postgresql" else timezone.now() + after


def record_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Write what became of these attempts, in a handful of statements however many they are.

    An outcome whose claim lapsed and was taken by another, or whose delivery is finished, changes nothing.
    """
    with transaction.atomic():
        held = {
            key: (claim_id, attempt_count, created_at)
            for key, claim_id, attempt_count, created_at in Delivery.objects.select_for_update()
            .filter(pk__among=[outcome.delivery_id for outcome in outcomes], status=Delivery.Status.PENDING)
            .order_by("pk")
            .values_list("pk", "claim_id", "attempt_count", "created_at")
        }
        made: list[Made] = []
        failed: dict[int, list[str]] = {}
        for outcome in outcomes:
            claim_id, attempt_count, created_at = held.get(outcome.delivery_id, (None, 0, outcome.started_at))
            if claim_id != outcome.claim_id:
                continue
            made.append(Made(outcome, attempt_count + 1, created_at))
            if not outcome.succeeded:
                failed.setdefault(attempt_count + 1, []).append(outcome.delivery_id)
        delivered = [one.outcome.delivery_id for one in made if one.outcome.succeeded]
        if delivered:
            _finish(delivered, Delivery.Status.DELIVERED, attempts=1)
        for number, ids in failed.items():
            if number >= MAX_ATTEMPTS:
                _finish(ids, Delivery.Status.DEAD, attempts=1)
                continue
            wait = WAITS[number - 1]
            # Taken after the locks, so no wait for one is part of a retry's waiting time.
            _pending(ids).update(attempt_count=number, claim_id=None, next_attempt_at=database_time(wait))
            nudge_after_commit(RETRY, countdown=wait + NUDGE_MARGIN)
        _insert_attempts(made)
    metrics.recorded(made, len(failed.get(MAX_ATTEMPTS, ())))
    _note_health(outcomes)


def _insert_attempts(made: Sequence[Made]) -> None:
    """One parameter a column on PostgreSQL, for hundreds of rows: ``bulk_create`` takes longer than all the rest."""
    if not made:
        return
    rows = [
        (
            one.outcome.delivery_id,
            one.number,
            connection.ops.adapt_datetimefield_value(one.outcome.started_at),
            one.outcome.duration_ms,
            one.outcome.status_code,
            one.outcome.error,
            one.outcome.answer,
        )
        for one in made
    ]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_ATTEMPTS_OF_COLUMNS, [list(column) for column in zip(*rows, strict=True)])
        else:
            cursor.executemany(_ATTEMPT, rows)


def bury(endpoint_ids: Iterable[str]) -> int:
    """Drop what is pending for endpoints that take nothing more. Returns how many deliveries died."""
    with transaction.atomic():
        ids = list(
            Delivery.objects.select_for_update()
            .filter(endpoint__in=list(endpoint_ids), status=Delivery.Status.PENDING)
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        return _finish(ids, Delivery.Status.DEAD) if ids else 0


def _pending(ids: Sequence[str]) -> QuerySet[Delivery]:
    return Delivery.objects.filter(pk__among=ids, status=Delivery.Status.PENDING)


def _finish(ids: Sequence[str], status: Delivery.Status, *, attempts: int = 0) -> int:
    return _pending(ids).update(
        status=status,
        attempt_count=F("attempt_count") + attempts,
        next_attempt_at=None,
        claim_id=None,
        finished_at=database_time(),
    )


def _note_health(outcomes: Iterable[Outcome]) -> None:
    """Remember for each endpoint whether its latest attempt failed, where that is news.

    After the deliveries' transaction: claims lock endpoints before deliveries.
    """
    news: dict[bool, list[str]] = {}
    for outcome in {outcome.endpoint_id: outcome for outcome in outcomes}.values():
        if outcome.endpoint_failing is None or outcome.endpoint_failing == outcome.succeeded:
            news.setdefault(not outcome.succeeded, []).append(outcome.endpoint_id)
    for failing, ids in news.items():
        with transaction.atomic():
            # Locked by id: another process may have news of some of them.
            known = (
                Endpoint.objects.select_for_update().filter(pk__among=ids).order_by("pk").values_list("pk", flat=True)
            )
            Endpoint.objects.filter(pk__among=list(known)).update(failing=failing)
