"""Taking due deliveries for this process: who is served, how many at a time, under a claim that fences later writes.

Two limits hold. Of an endpoint, at most WEBHOOK_ENDPOINT_CONCURRENCY attempts are under way in all processes together;
the lock on its row makes the count sure. Of this process, the slots go to endpoints by how they behave, so receivers
that hang, however many, never hold the last free slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction

from config.kernel import clock
from config.kernel.encryption import DecryptionFailed, decrypt
from config.kernel.ids import among, listed, new_id
from webhooks import transitions
from webhooks.models import Delivery

# Endpoints looked at in one claim: those whose deliveries have waited longest.
CANDIDATES_MAX = 500

# Hops from endpoint to endpoint along an index: an endpoint with a hundred thousand due deliveries costs one step, as
# does one with a single delivery. The conditions are literal, for partial indexes are used only if they are.
_CANDIDATES = """
    WITH RECURSIVE waiting (endpoint_id) AS (
        SELECT min(endpoint_id) FROM webhooks_delivery WHERE status = 'PENDING'
        UNION ALL
        SELECT (
            SELECT min(later.endpoint_id) FROM webhooks_delivery later
            WHERE later.status = 'PENDING' AND later.endpoint_id > waiting.endpoint_id
        )
        FROM waiting WHERE waiting.endpoint_id IS NOT NULL
    )
    SELECT endpoint_id, open, failing, in_flight FROM (
        SELECT
            endpoint.id AS endpoint_id,
            (endpoint.enabled AND endpoint.deleted_at IS NULL) AS open,
            endpoint.failing AS failing,
            (
                SELECT min(next_attempt_at) FROM webhooks_delivery
                WHERE status = 'PENDING' AND endpoint_id = endpoint.id
            ) AS first_due,
            (
                SELECT count(*) FROM webhooks_delivery
                WHERE claim_id IS NOT NULL AND status = 'PENDING' AND endpoint_id = endpoint.id
                AND next_attempt_at > %s
            ) AS in_flight
        FROM waiting JOIN webhooks_endpoint endpoint ON endpoint.id = waiting.endpoint_id
    ) AS candidates
    WHERE first_due <= %s AND (in_flight < %s OR NOT open)
    ORDER BY first_due
    LIMIT %s
"""
# The previous secret only while its grace window lasts.
_ENDPOINTS = """
    SELECT id, url, failing, secret, CASE WHEN secondary_expires_at > %s THEN secondary_secret END
    FROM webhooks_endpoint WHERE id {among} AND enabled AND deleted_at IS NULL {lock}
"""
# The first due of each of these endpoints, and what is under way. One arm an endpoint would be planned one by one.
_DUE = """
    SELECT
        endpoint.id,
        (
            SELECT {join}(id, ' ') FROM (
                SELECT id FROM webhooks_delivery
                WHERE status = 'PENDING' AND endpoint_id = endpoint.id AND next_attempt_at <= %s
                ORDER BY next_attempt_at, id LIMIT %s
            ) AS due
        ),
        (
            SELECT count(*) FROM webhooks_delivery
            WHERE claim_id IS NOT NULL AND status = 'PENDING' AND endpoint_id = endpoint.id AND next_attempt_at > %s
        )
    FROM webhooks_endpoint endpoint WHERE endpoint.id {among}
"""
_LOCK = """
    SELECT id, event_id, run_id, request_id, body, attempt_count, endpoint_id FROM webhooks_delivery
    WHERE id {among} AND status = 'PENDING' AND next_attempt_at <= %s
    ORDER BY next_attempt_at, id {lock}
"""


@dataclass(frozen=True)
class Candidate:
    """An endpoint with something due. ``failing`` as in the model."""

    endpoint_id: str
    failing: bool | None
    in_flight: int


@dataclass(frozen=True)
class Claim:
    """One attempt that this process has taken upon itself. ``secret`` is None if it can't be decrypted."""

    claim_id: str
    delivery_id: str
    event_id: str
    run_id: str
    request_id: str
    number: int
    body: bytes = field(repr=False)
    endpoint_id: str
    endpoint_failing: bool | None
    url: str = field(repr=False)
    secret: str | None = field(repr=False)
    secondary_secret: str | None = field(repr=False)
    # The database's time at a moment of this process's monotonic clock, so a wrong clock here signs no wrong time.
    claimed_at: datetime
    claimed_tick: float

    def now(self) -> datetime:
        return self.claimed_at + timedelta(seconds=time.monotonic() - self.claimed_tick)


def anything_due() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM webhooks_delivery WHERE status = 'PENDING' AND next_attempt_at <= %s LIMIT 1",
            [_adapt(clock.now())],
        )
        return cursor.fetchone() is not None


def take_due(busy: int) -> tuple[list[Claim], bool]:
    """Claim what this process should send now, ``busy`` of its slots being taken.

    Returns the claims, at most WEBHOOK_BATCH_SIZE, and whether deliveries were left for want of a slot here.
    """
    candidates, closed = _candidates()
    if closed:
        transitions.mark_dead(closed)
    allowances = allocate_slots(candidates, busy, settings.WEBHOOK_WORKER_CAPACITY, settings.WEBHOOK_BATCH_SIZE)
    if not allowances:
        return [], bool(candidates)
    return _claim(allowances), len(allowances) < len(candidates)


def allocate_slots(candidates: Sequence[Candidate], busy: int, slots: int, most: int) -> dict[str, int]:
    """How many attempts each endpoint may start, by endpoint id.

    A slot is given while fewer than a share of all are taken. The share depends on who asks: an endpoint that answered
    last time may have the last slot for its first attempt under way; one that is not known yet leaves a quarter free,
    one that failed a half. Further attempts side by side are for quieter times. So neither 200 hanging receivers nor
    one with a long queue keep a good one waiting.
    """
    first_share = {False: slots, None: slots * 3 // 4, True: slots // 2}
    further_share = {False: slots // 2, None: slots // 4, True: slots // 4}
    allowances: dict[str, int] = {}
    given = 0
    for under_way in range(settings.WEBHOOK_ENDPOINT_CONCURRENCY):  # those with the fewest come first
        for candidate in candidates:
            allowed = allowances.get(candidate.endpoint_id, 0)
            if candidate.in_flight + allowed != under_way:
                continue
            share = further_share if under_way else first_share
            # However small the pool, nobody's share is nothing.
            if given < most and busy + given < max(share[candidate.failing], 1):
                allowances[candidate.endpoint_id] = allowed + 1
                given += 1
    return allowances


def _candidates() -> tuple[list[Candidate], list[str]]:
    """Endpoints that may be served, longest waiting first, and the ids of closed ones that have deliveries left."""
    now = _adapt(clock.now())
    with connection.cursor() as cursor:
        cursor.execute(_CANDIDATES, [now, now, settings.WEBHOOK_ENDPOINT_CONCURRENCY, CANDIDATES_MAX])
        rows = cursor.fetchall()
    found = [
        Candidate(endpoint_id, None if failing is None else bool(failing), in_flight)
        for endpoint_id, is_open, failing, in_flight in rows
        if is_open
    ]
    return found, [row[0] for row in rows if not row[1]]


@transaction.atomic
def _claim(allowances: dict[str, int]) -> list[Claim]:
    now, tick = clock.now(), time.monotonic()
    moment = _adapt(now)
    lock = "FOR UPDATE SKIP LOCKED" if connection.features.has_select_for_update_skip_locked else ""
    with connection.cursor() as cursor:
        cursor.execute(_ENDPOINTS.format(among=among(), lock=lock), [moment, listed(allowances)])
        endpoints = {row[0]: _Sendable(*row[1:]) for row in cursor.fetchall()}
        if not endpoints:
            return []
        due = _due_ids(endpoints, allowances, moment)
        cursor.execute(_LOCK.format(among=among(), lock=lock), [listed(due), moment])
        rows = cursor.fetchall()
    claim_id = new_id("clm")
    lapses = now + timedelta(seconds=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + settings.WEBHOOK_CLAIM_MARGIN_SECONDS)
    Delivery.objects.filter(pk__among=[row[0] for row in rows]).update(claim_id=claim_id, next_attempt_at=lapses)
    return [
        Claim(
            claim_id=claim_id,
            delivery_id=delivery_id,
            event_id=event_id,
            run_id=run_id,
            request_id=request_id,
            number=attempt_count + 1,
            body=body.encode(),
            endpoint_id=endpoint_id,
            endpoint_failing=endpoints[endpoint_id].failing,
            url=endpoints[endpoint_id].url,
            secret=endpoints[endpoint_id].secret,
            secondary_secret=endpoints[endpoint_id].secondary_secret,
            claimed_at=now,
            claimed_tick=tick,
        )
        for delivery_id, event_id, run_id, request_id, body, attempt_count, endpoint_id in rows
    ]


class _Sendable:
    """What sending to an endpoint takes. A secret that no key opens costs that endpoint its deliveries, not everybody
    theirs.
    """

    def __init__(self, url: str, failing: bool | None, secret: str, secondary_secret: str | None) -> None:
        self.url = url
        self.failing = None if failing is None else bool(failing)
        self.secret = _opened(secret)
        self.secondary_secret = _opened(secondary_secret)


def _opened(secret: str | None) -> str | None:
    try:
        return decrypt(secret) or None if secret else None
    except DecryptionFailed:
        return None


def _due_ids(endpoint_ids: Iterable[str], allowances: dict[str, int], moment: datetime | str) -> list[str]:
    """The deliveries to take, counted anew now that no other process can claim for these endpoints."""
    most = settings.WEBHOOK_ENDPOINT_CONCURRENCY
    sql = _DUE.format(
        join="string_agg" if connection.vendor == "postgresql" else "group_concat",
        among=among(),
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [moment, most, moment, listed(endpoint_ids)])
        return [
            key
            for endpoint_id, keys, in_flight in cursor.fetchall()
            for key in (keys or "").split()[: max(min(most - in_flight, allowances[endpoint_id]), 0)]
        ]


def _adapt(moment: datetime) -> datetime | str:
    """As the database wants it in raw SQL: SQLite has only text."""
    return connection.ops.adapt_datetimefield_value(moment) or ""
