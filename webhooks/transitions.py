"""The only writer of a delivery's status, and of what changes with it: the due time, the claim, the attempts.

A delivery is PENDING until an attempt succeeds (DELIVERED), until its fifth attempt fails, or until its endpoint is
disabled or deleted (both DEAD). Locks are taken endpoint first, then deliveries by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import DateTimeField, F, Func
from django.db.models.expressions import Combinable
from django.utils import timezone

from config.database.protected import ProtectedQuerySet, take_key
from config.queue.nudges import nudge_after_commit
from webhooks import metrics
from webhooks.models import Delivery, Endpoint
from webhooks.outcomes import MAX_ATTEMPTS, WAITS, Outcome, RecordedAttempt

RETRY = "webhooks.retry_due"
# A late nudge finds its delivery due. An early one would find nothing.
NUDGE_MARGIN = 0.1
_KEY = take_key(Delivery)

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


class _Clock(Func):
    function = "clock_timestamp"
    output_field = DateTimeField()


def database_time(later: float = 0) -> datetime | Combinable:
    """The database's time when a row is written, plus ``later`` seconds. ``clock.now`` may be off by a round trip,
    and no attempt may be early.
    """
    after = timedelta(seconds=later)
    return _Clock() + after if connection.vendor == "postgresql" else timezone.now() + after


def record_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes of these attempts, in a number of statements that does not depend on how many they are.

    An outcome changes nothing if its claim has lapsed and another process has claimed, or if its delivery is finished.
    """
    with transaction.atomic():
        held = {
            key: (claim_id, attempt_count, created_at)
            for key, claim_id, attempt_count, created_at in Delivery.objects.select_for_update()
            .filter(pk__any_of=[outcome.delivery_id for outcome in outcomes], status=Delivery.Status.PENDING)
            .order_by("pk")
            .values_list("pk", "claim_id", "attempt_count", "created_at")
        }
        recorded: list[RecordedAttempt] = []
        failed: dict[int, list[str]] = {}
        for outcome in outcomes:
            claim_id, attempt_count, created_at = held.get(outcome.delivery_id, (None, 0, outcome.started_at))
            if claim_id != outcome.claim_id:
                continue
            recorded.append(RecordedAttempt(outcome, attempt_count + 1, created_at))
            if not outcome.succeeded:
                failed.setdefault(attempt_count + 1, []).append(outcome.delivery_id)
        delivered = [one.outcome.delivery_id for one in recorded if one.outcome.succeeded]
        if delivered:
            _finish(delivered, Delivery.Status.DELIVERED, attempts=1)
        for number, ids in failed.items():
            if number >= MAX_ATTEMPTS:
                _finish(ids, Delivery.Status.DEAD, attempts=1)
                continue
            wait = WAITS[number - 1]
            # The time is read after the locks were taken: waiting for a lock must not shorten the wait.
            _pending(ids).update(attempt_count=number, claim_id=None, next_attempt_at=database_time(wait))
            nudge_after_commit(RETRY, countdown=wait + NUDGE_MARGIN)
        _insert_attempts(recorded)
    metrics.count_attempts(recorded, len(failed.get(MAX_ATTEMPTS, ())))
    _note_health(outcomes)


def _insert_attempts(recorded: Sequence[RecordedAttempt]) -> None:
    """On PostgreSQL one parameter a column, for hundreds of rows: ``bulk_create`` takes longer than all the rest."""
    if not recorded:
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
        for one in recorded
    ]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_ATTEMPTS_OF_COLUMNS, [list(column) for column in zip(*rows, strict=True)])
        else:
            cursor.executemany(_ATTEMPT, rows)


def mark_dead(endpoint_ids: Iterable[str]) -> int:
    """Give up the pending deliveries of these endpoints, which are disabled or deleted. Returns how many."""
    with transaction.atomic():
        ids = list(
            Delivery.objects.select_for_update()
            .filter(endpoint__in=list(endpoint_ids), status=Delivery.Status.PENDING)
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        return _finish(ids, Delivery.Status.DEAD) if ids else 0


def _pending(ids: Sequence[str]) -> ProtectedQuerySet[Delivery]:
    return Delivery.objects.filter(pk__any_of=ids, status=Delivery.Status.PENDING)


def _finish(ids: Sequence[str], status: Delivery.Status, *, attempts: int = 0) -> int:
    return _pending(ids).change(
        _KEY,
        status=status,
        attempt_count=F("attempt_count") + attempts,
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
                Endpoint.objects.select_for_update().filter(pk__any_of=ids).order_by("pk").values_list("pk", flat=True)
            )
            Endpoint.objects.filter(pk__any_of=list(known)).update(failing=failing)
