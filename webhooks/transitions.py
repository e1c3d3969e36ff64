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
from django.db.models import F, QuerySet
from django.utils import timezone

from config.api.broker import nudge_after_commit
from webhooks import figures
from webhooks.models import Attempt, Delivery, Endpoint

# Seconds from the end of the failed attempt to the next one; the first is made at once.
WAITS = (30, 90, 270, 600)
MAX_ATTEMPTS = len(WAITS) + 1
RETRY = "webhooks.retry_due"
# A nudge that comes a little late finds its delivery due; one that comes early would be for nothing.
NUDGE_MARGIN = 0.1


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
        return self.status_code is not None and 200 <= self.status_code < 300


def database_now() -> datetime:
    """The database's time as it is now. ``clock.now`` may be off by a round trip, and no attempt may be early."""
    if connection.vendor != "postgresql":
        return timezone.now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


def record_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Write what became of these attempts, in a handful of statements however many they are.

    An outcome whose claim lapsed and was taken by another, or whose delivery is finished, changes nothing.
    """
    with transaction.atomic():
        held = {
            row.pk: row
            for row in Delivery.objects.select_for_update()
            .filter(pk__in=[outcome.delivery_id for outcome in outcomes], status=Delivery.Status.PENDING)
            .only("id", "claim_id", "attempt_count", "created_at")
            .order_by("pk")
        }
        # After the locks, so no wait for one is part of a retry's waiting time.
        now = database_now()
        delivered: list[str] = []
        failed: dict[int, list[str]] = {}
        attempts = []
        for outcome in outcomes:
            row = held.get(outcome.delivery_id)
            if row is None or row.claim_id != outcome.claim_id:
                continue
            number = row.attempt_count + 1
            attempts.append(
                Attempt(
                    delivery_id=row.pk,
                    number=number,
                    started_at=outcome.started_at,
                    duration_ms=outcome.duration_ms,
                    status_code=outcome.status_code,
                    error=outcome.error,
                    answer=outcome.answer,
                )
            )
            if outcome.succeeded:
                delivered.append(row.pk)
            else:
                failed.setdefault(number, []).append(row.pk)
        if delivered:
            _finish(delivered, Delivery.Status.DELIVERED, now, attempts=1)
        for number, ids in failed.items():
            if number >= MAX_ATTEMPTS:
                _finish(ids, Delivery.Status.DEAD, now, attempts=1)
                continue
            wait = WAITS[number - 1]
            _pending(ids).update(attempt_count=number, claim_id=None, next_attempt_at=now + timedelta(seconds=wait))
            nudge_after_commit(RETRY, countdown=wait + NUDGE_MARGIN)
        Attempt.objects.bulk_create(attempts)
    figures.recorded(((held[attempt.delivery_id], attempt) for attempt in attempts), len(failed.get(MAX_ATTEMPTS, ())))
    _note_health(outcomes)


def bury(endpoint_ids: Iterable[str]) -> int:
    """Drop what is pending for endpoints that take nothing more. Returns how many deliveries died."""
    with transaction.atomic():
        ids = list(
            Delivery.objects.select_for_update()
            .filter(endpoint__in=list(endpoint_ids), status=Delivery.Status.PENDING)
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        return _finish(ids, Delivery.Status.DEAD, database_now()) if ids else 0


def _pending(ids: Sequence[str]) -> QuerySet[Delivery]:
    return Delivery.objects.filter(pk__in=ids, status=Delivery.Status.PENDING)


def _finish(ids: Sequence[str], status: Delivery.Status, now: datetime, *, attempts: int = 0) -> int:
    return _pending(ids).update(
        status=status,
        attempt_count=F("attempt_count") + attempts,
        next_attempt_at=None,
        claim_id=None,
        finished_at=now,
    )


def _note_health(outcomes: Iterable[Outcome]) -> None:
    """Remember for each endpoint whether its latest attempt failed, where that is news.

    One statement an endpoint, after the deliveries' transaction: claims lock endpoints before deliveries.
    """
    for outcome in {outcome.endpoint_id: outcome for outcome in outcomes}.values():
        if outcome.endpoint_failing is None or outcome.endpoint_failing == outcome.succeeded:
            Endpoint.objects.filter(pk=outcome.endpoint_id).update(failing=not outcome.succeeded)
