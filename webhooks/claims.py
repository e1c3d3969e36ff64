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

from config.api import clock
from config.api.encryption import DecryptionFailed
from config.api.ids import new_id
from webhooks import transitions
from webhooks.models import Delivery, Endpoint, opened

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
_IN_FLIGHT = """
    SELECT endpoint_id, count(*) FROM webhooks_delivery
    WHERE claim_id IS NOT NULL AND status = 'PENDING' AND endpoint_id IN ({places}) AND next_attempt_at > %s
    GROUP BY endpoint_id
"""
# The first due of each of these endpoints, as many of each. One arm an endpoint would be planned one by one: 35 ms.
_DUE = """
    SELECT (
        SELECT {join}(id, ' ') FROM (
            SELECT id FROM webhooks_delivery
            WHERE status = 'PENDING' AND endpoint_id = endpoint.id AND next_attempt_at <= %s
            ORDER BY next_attempt_at, id LIMIT %s
        ) AS due
    )
    FROM webhooks_endpoint endpoint WHERE endpoint.id IN ({places})
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
        transitions.bury(closed)
    allowances = allot(candidates, busy, settings.WEBHOOK_WORKER_THREADS, settings.WEBHOOK_BATCH_SIZE)
    if not allowances:
        return [], bool(candidates)
    return _claim(allowances), len(allowances) < len(candidates)


def allot(candidates: Sequence[Candidate], busy: int, slots: int, most: int) -> dict[str, int]:
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
    endpoints = {
        endpoint.pk: endpoint
        for endpoint in Endpoint.objects.select_for_update(
            skip_locked=connection.features.has_select_for_update_skip_locked
        )
        .filter(pk__in=list(allowances), enabled=True, deleted_at=None)
        .defer("secret", "secondary_secret")
    }
    if not endpoints:
        return []
    now, tick = clock.now(), time.monotonic()
    due = _due_ids(endpoints, allowances, now)
    rows = list(
        Delivery.objects.select_for_update(skip_locked=connection.features.has_select_for_update_skip_locked)
        .filter(pk__in=due, status=Delivery.Status.PENDING, next_attempt_at__lte=now)
        .only("id", "event_id", "run_id", "body", "attempt_count", "endpoint_id")
        .order_by("next_attempt_at", "pk")
    )
    claim_id = new_id("clm")
    lapses = now + timedelta(seconds=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + settings.WEBHOOK_CLAIM_MARGIN_SECONDS)
    Delivery.objects.filter(pk__in=[row.pk for row in rows]).update(claim_id=claim_id, next_attempt_at=lapses)
    secrets = _secrets({row.endpoint_id for row in rows}, now)
    return [
        Claim(
            claim_id=claim_id,
            delivery_id=row.pk,
            event_id=row.event_id,
            run_id=row.run_id,
            number=row.attempt_count + 1,
            body=row.body.encode(),
            endpoint_id=row.endpoint_id,
            endpoint_failing=endpoints[row.endpoint_id].failing,
            url=endpoints[row.endpoint_id].url,
            secret=secrets[row.endpoint_id][0],
            secondary_secret=secrets[row.endpoint_id][1],
            claimed_at=now,
            claimed_tick=tick,
        )
        for row in rows
    ]


def _due_ids(endpoint_ids: Iterable[str], allowances: dict[str, int], now: datetime) -> list[str]:
    """The deliveries to take, counted anew now that no other process can claim for these endpoints."""
    ids, moment = list(endpoint_ids), _adapt(now)
    with connection.cursor() as cursor:
        cursor.execute(_IN_FLIGHT.format(places=", ".join(["%s"] * len(ids))), [*ids, moment])
        in_flight = dict(cursor.fetchall())
        by_room: dict[int, list[str]] = {}
        for endpoint_id in ids:
            room = settings.WEBHOOK_ENDPOINT_CONCURRENCY - in_flight.get(endpoint_id, 0)
            if room > 0:
                by_room.setdefault(min(room, allowances[endpoint_id]), []).append(endpoint_id)
        if not by_room:
            return []
        join = "string_agg" if connection.vendor == "postgresql" else "group_concat"
        selects: list[str] = []
        values: list[str | int | datetime] = []
        for room, some in by_room.items():
            selects.append(_DUE.format(join=join, places=", ".join(["%s"] * len(some))))
            values += [moment, room, *some]
        cursor.execute(" UNION ALL ".join(selects), values)
        return [key for (keys,) in cursor.fetchall() if keys for key in keys.split(" ")]


def _secrets(endpoint_ids: set[str], now: datetime) -> dict[str, tuple[str | None, str | None]]:
    """Each endpoint's secrets. One that no key opens costs that endpoint its deliveries, not everybody theirs."""
    wanted = Endpoint.objects.only("secret", "secondary_secret", "secondary_expires_at")
    try:
        endpoints = list(wanted.filter(pk__in=endpoint_ids))
    except DecryptionFailed:
        endpoints = [endpoint for key in endpoint_ids if (endpoint := opened(wanted.filter(pk=key))) is not None]
    return {endpoint.pk: (endpoint.secret or None, endpoint.secondary_at(now)) for endpoint in endpoints}


def _adapt(moment: datetime) -> datetime | str:
    """As the database wants it in raw SQL: SQLite has only text."""
    return connection.ops.adapt_datetimefield_value(moment) or ""
