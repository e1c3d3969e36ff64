"""The only writer of a delivery's status and of what changes with it: the due time, the claim, the attempts.

A delivery is PENDING until an attempt succeeds (DELIVERED), or until it becomes DEAD: its fifth attempt fails, its
endpoint is disabled or deleted, or too many newer deliveries wait for its endpoint. A claim counts the attempt, so at
most five attempts are sent even if no outcome is ever recorded.

Locks are taken endpoint first, then deliveries by id; work in batches skips what is locked. No lock is FOR UPDATE,
because that would block the runs that record events for the endpoint.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Count, F, Q, QuerySet
from django.db.models.functions import Now

from config.database.batches import in_batches
from config.database.protected import ProtectedQuerySet, take_key
from config.kernel import clock
from config.queue.publisher import nudge_after_commit
from webhooks import metrics
from webhooks.models import Attempt, Delivery, Endpoint
from webhooks.outbox import DELIVER

# Added to an attempt's time limit to get the time at which its claim ends.
WEBHOOK_CLAIM_MARGIN_SECONDS = 15
# The most pending deliveries to the installation endpoint, and to any other endpoint. The oldest above it are dropped.
WEBHOOK_INSTALLATION_PENDING_MAX = 200_000
WEBHOOK_PENDING_MAX = 10_000

# Seconds from the end of a failed attempt to the next one. The first attempt is made at once.
WAITS = (30, 90, 270, 600)
MAX_ATTEMPTS = len(WAITS) + 1
# The error of an attempt whose process ended before it recorded the outcome.
UNKNOWN = "The outcome is not known."

logger = logging.getLogger(__name__)

RETRY = "webhooks.retry_due"
# Added to the countdown of a nudge: an early nudge would find nothing due.
NUDGE_MARGIN = 0.1
_KEY = take_key(Delivery)

# The most rows that a step of the dispatcher changes, because it sends nothing meanwhile.
BATCH = 500

# The conditions are literals, so that SQLite, too, uses the partial index. Each part asks for the first row in the
# order of an index: otherwise a wrong estimate makes the database read the whole table.
_ANYTHING = """
    SELECT
        (SELECT 1 FROM webhooks_delivery WHERE status = 'PENDING' AND ready = true ORDER BY next_attempt_at LIMIT 1),
        (
            SELECT next_attempt_at FROM webhooks_delivery WHERE status = 'PENDING' AND ready = false
            ORDER BY next_attempt_at LIMIT 1
        ) <= %s,
        (SELECT 1 FROM webhooks_endpoint WHERE drop_until IS NOT NULL ORDER BY drop_until LIMIT 1)
"""


def claim(deliveries: Sequence[Delivery], claim_id: str, now: datetime) -> None:
    """Count an attempt of each of these deliveries, which the caller has locked."""
    lapses_at = now + timedelta(seconds=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + WEBHOOK_CLAIM_MARGIN_SECONDS)
    Delivery.objects.filter(pk__any_of=[delivery.pk for delivery in deliveries]).update(
        attempt_count=F("attempt_count") + 1, claim_id=claim_id, ready=False, next_attempt_at=lapses_at
    )
    for delivery in deliveries:
        delivery.attempt_count, delivery.claim_id = delivery.attempt_count + 1, claim_id
        delivery.next_attempt_at = lapses_at


def record_outcomes(attempts: Sequence[Attempt]) -> None:
    """Write the outcomes of these attempts, in a fixed number of statements. An outcome changes nothing if its claim
    has lapsed or its delivery is finished. An attempt that was not sent does not count.
    """
    with transaction.atomic():
        pending = _pending([one.delivery.pk for one in attempts]).select_for_update(no_key=True).order_by("pk")
        held = dict(pending.values_list("pk", "claim_id"))
        valid = [one for one in attempts if held.get(one.delivery.pk) == one.delivery.claim_id]
        ended = [one for one in valid if one.started_at]
        if returned := [one.delivery.pk for one in valid if not one.started_at]:
            _pending(returned).update(
                attempt_count=F("attempt_count") - 1, claim_id=None, ready=True, next_attempt_at=Now()
            )
        _end_attempts(ended)
    _note_health([one for one in attempts if one.started_at])


def _end_attempts(ended: Sequence[Attempt]) -> None:
    """Store these attempts and change their deliveries, which are locked."""
    if delivered := [one.delivery.pk for one in ended if one.succeeded]:
        _finish(delivered, Delivery.Status.DELIVERED)
    failed: dict[int, list[str]] = {}
    for one in ended:
        one.pk = None  # a transaction that was rolled back may have set it
        if not one.succeeded:
            failed.setdefault(one.number, []).append(one.delivery.pk)
    for number, ids in failed.items():
        if number >= MAX_ATTEMPTS:
            _finish(ids, Delivery.Status.DEAD)
            continue
        wait = WAITS[number - 1]
        # By the database's time, because the local clock may be wrong. An earlier statement has taken the locks, so
        # waiting for them does not shorten the wait.
        _pending(ids).update(claim_id=None, next_attempt_at=Now() + timedelta(seconds=wait))
        nudge_after_commit(RETRY, countdown=wait + NUDGE_MARGIN)
    Attempt.objects.bulk_create(ended)
    transaction.on_commit(lambda: _count(ended, len(failed.get(MAX_ATTEMPTS, ()))))


def _count(ended: Iterable[Attempt], died: int) -> None:
    """Count attempts after their commit; ``died`` of their deliveries became dead."""
    for one in ended:
        metrics.attempts.labels(f"{one.status_code // 100}xx" if one.status_code else "error").inc()
        if one.number == 1:
            metrics.lag_seconds.observe(max(0.0, (one.started_at - one.delivery.created_at).total_seconds()))
    metrics.dead.inc(died)


def pass_on_due() -> int:
    """Handle a batch of ended waits, lapsed claims and dropping endpoints. Returns how many rows it changed."""
    _, due, dropping = anything_due()
    return (_end_waits() if due else 0) + (_drop_batch() if dropping else 0)


def anything_due() -> tuple[bool, bool, bool]:
    """Whether a delivery is ready, whether a wait is over or a claim has lapsed, and whether an endpoint drops some."""
    with connection.cursor() as cursor:
        cursor.execute(_ANYTHING, [connection.ops.adapt_datetimefield_value(clock.now())])
        ready, due, dropping = cursor.fetchone()
    return bool(ready), bool(due), bool(dropping)


@transaction.atomic
def _end_waits() -> int:
    """Deliveries whose wait is over become ready. A claim that lapsed without an outcome is a failed attempt."""
    waited, lapsed = [], []
    hold = timedelta(seconds=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + WEBHOOK_CLAIM_MARGIN_SECONDS)
    milliseconds = hold // timedelta(milliseconds=1)
    for delivery in _batch(Q(next_attempt_at__lte=clock.now()), ready=False).defer("body"):
        if delivery.claim_id is None:
            waited.append(delivery.pk)
        else:
            started_at = (delivery.next_attempt_at or clock.now()) - hold
            lapsed.append(delivery.attempt(started_at=started_at, duration_ms=milliseconds, error=UNKNOWN))
    if waited:
        _pending(waited).update(ready=True)
    _end_attempts(lapsed)
    return len(waited) + len(lapsed)


@transaction.atomic
def drop(endpoint_ids: Iterable[str]) -> None:
    """Make ``pass_on_due`` mark the pending deliveries dead, in batches. Until then, nothing is sent to them."""
    _locked(endpoint_ids).update(drop_until=clock.now())
    nudge_after_commit(DELIVER)


@transaction.atomic
def _drop_batch() -> int:
    """Mark a batch of dropped deliveries dead. When none is left, deliveries to the endpoint are sent again."""
    dropping = Endpoint.objects.filter(drop_until__isnull=False).order_by("drop_until")
    endpoint = dropping.select_for_update(no_key=True, skip_locked=True).only("drop_until").first()
    if endpoint is None:
        return 0
    which = Q(endpoint=endpoint, created_at__lte=endpoint.drop_until)
    done = _drop_of(which, "endpoint")
    if done < BATCH and not any(_batch(which, ready=ready, lock=False).exists() for ready in (True, False)):
        Endpoint.objects.filter(pk=endpoint.pk).update(drop_until=None)
        return done + 1
    return done


def drop_excess() -> int:
    """Mark dead the oldest deliveries to endpoints with too many pending ones. Returns how many."""
    pending, total = Delivery.objects.filter(status=Delivery.Status.PENDING).order_by("-pk"), 0
    waiting = pending.order_by().values_list("endpoint_id", "endpoint__user_id").annotate(count=Count("pk"))
    for endpoint_id, user_id, _ in waiting.filter(count__gt=WEBHOOK_PENDING_MAX):
        most = WEBHOOK_INSTALLATION_PENDING_MAX if user_id is None else WEBHOOK_PENDING_MAX
        if newest := pending.filter(endpoint=endpoint_id).values_list("pk", flat=True)[most:].first():
            # A delivery that is being sent is not dropped.
            which = Q(endpoint=endpoint_id, pk__lte=newest, claim_id=None)
            dropped = in_batches(partial(_drop_of, which, "excess"))
            logger.warning("endpoint %s has too many pending deliveries: %s are dropped", endpoint_id, dropped)
            total += dropped
    return total


@transaction.atomic
def _drop_of(which: Q, reason: str) -> int:
    """Mark a batch of the pending deliveries ``which`` dead. Returns how many."""
    ids: list[str] = []
    for ready in (True, False):
        ids += _batch(which, ready=ready).values_list("pk", flat=True)[: BATCH - len(ids)]
    done = _finish(ids, Delivery.Status.DEAD)
    transaction.on_commit(lambda: metrics.dropped.labels(reason).inc(done))
    return done


def _batch(which: Q, *, ready: bool, lock: bool = True) -> QuerySet[Delivery]:
    """A batch of pending deliveries, in the order of their index: without the order, a wrong estimate makes the
    database read the whole table. Rows that another transaction has locked are skipped.
    """
    # SQLite uses the index for IN only.
    rows = Delivery.objects.filter(which, status=Delivery.Status.PENDING, ready__in=[ready]).order_by("next_attempt_at")
    return (rows.select_for_update(no_key=True, skip_locked=True) if lock else rows)[:BATCH]


def _pending(ids: Sequence[str]) -> ProtectedQuerySet[Delivery]:
    return Delivery.objects.filter(pk__any_of=ids, status=Delivery.Status.PENDING)


def _finish(ids: Sequence[str], status: Delivery.Status) -> int:
    return _pending(ids).change(_KEY, status=status, next_attempt_at=None, claim_id=None, finished_at=Now())


def _note_health(attempts: Iterable[Attempt]) -> None:
    """Write whether each endpoint's latest attempt failed. Called last: claims lock endpoints before deliveries."""
    latest = {one.delivery.endpoint_id: one for one in attempts}
    # ``failing`` as it was when the attempt was claimed.
    changed = [one for one in latest.values() if one.delivery.endpoint.failing in (None, one.succeeded)]
    for failing in (True, False):
        if ids := [one.delivery.endpoint_id for one in changed if one.succeeded is not failing]:
            with transaction.atomic():
                _locked(ids).update(failing=failing)


def _locked(endpoint_ids: Iterable[str]) -> QuerySet[Endpoint]:
    """These endpoints, locked in the order of their ids, because another process may change some of them."""
    rows = Endpoint.objects.select_for_update(no_key=True).filter(pk__any_of=list(endpoint_ids)).order_by("pk")
    return Endpoint.objects.filter(pk__any_of=list(rows.values_list("pk", flat=True)))
