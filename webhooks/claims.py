"""Claims due deliveries for this process. The claim's id fences the writes that follow.

There are two limits. The attempts to an endpoint are limited over all processes together; the lock on the endpoint's
row makes this exact. The slots of this process are allocated by how endpoints have answered, so that receivers that
hang never take the last free slots, however many they are.
"""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from django.db import connection, transaction

from config.kernel import clock
from config.kernel.ids import any_of, array, new_id
from webhooks import transitions
from webhooks.models import Delivery, Endpoint

# The most concurrent attempts: of a process, to the installation endpoint, and to any other endpoint.
WEBHOOK_WORKER_CAPACITY = 512
WEBHOOK_INSTALLATION_CONCURRENCY = 32
WEBHOOK_ENDPOINT_CONCURRENCY = 4
# The most deliveries that are claimed at a time, and the most endpoints that one search considers.
WEBHOOK_BATCH_SIZE = 200
CANDIDATES_MAX = 500

# Goes from endpoint to endpoint along an index: an endpoint with ready deliveries costs one step, however many they
# are, and one without them costs nothing. The conditions are literals, because otherwise a partial index is not used.
# The ORDER BY has three columns, so that the database uses no other index.
_CANDIDATES = """
    WITH RECURSIVE waiting (endpoint_id, step) AS (
        SELECT CAST(%s AS varchar(32)), 0
        UNION ALL
        SELECT (
            SELECT later.endpoint_id FROM webhooks_delivery later
            WHERE later.status = 'PENDING' AND (later.ready, later.endpoint_id) > (true, waiting.endpoint_id)
            ORDER BY later.ready, later.endpoint_id, later.next_attempt_at LIMIT 1
        ), step + 1
        FROM waiting WHERE waiting.endpoint_id IS NOT NULL AND step < %s
    )
    SELECT
        endpoint.id,
        endpoint.failing,
        (
            SELECT count(*) FROM webhooks_delivery
            WHERE claim_id IS NOT NULL AND status = 'PENDING' AND endpoint_id = endpoint.id
            AND next_attempt_at > %s
        ) AS in_flight,
        endpoint.user_id IS NULL AS of_installation,
        (endpoint.enabled AND endpoint.deleted_at IS NULL) AS is_open,
        endpoint.drop_until IS NOT NULL AS is_dropping
    FROM waiting JOIN webhooks_endpoint endpoint ON endpoint.id = waiting.endpoint_id AND step > 0
    ORDER BY (
        SELECT min(next_attempt_at) FROM webhooks_delivery
        WHERE status = 'PENDING' AND ready = true AND endpoint_id = endpoint.id
    )
"""
# The first due deliveries of each of these endpoints, and how many are being sent. Not a UNION with one part for each
# endpoint, because each part would be planned by itself.
_DUE = """
    SELECT
        endpoint.id,
        (
            SELECT {join}(id, ' ') FROM (
                SELECT id FROM webhooks_delivery
                WHERE status = 'PENDING' AND ready = true AND endpoint_id = endpoint.id
                ORDER BY next_attempt_at LIMIT %s
            ) AS due
        ),
        (
            SELECT count(*) FROM webhooks_delivery
            WHERE claim_id IS NOT NULL AND status = 'PENDING' AND endpoint_id = endpoint.id AND next_attempt_at > %s
        )
    FROM webhooks_endpoint endpoint WHERE endpoint.id {any_of}
"""


class Candidate(NamedTuple):
    """An endpoint with ready deliveries. ``failing`` as in the model."""

    endpoint_id: str
    failing: bool | None
    in_flight: int
    of_installation: bool = False
    is_open: bool = True
    is_dropping: bool = False


def concurrency(of_installation: bool) -> int:
    """How many concurrent attempts to an endpoint are allowed."""
    return WEBHOOK_INSTALLATION_CONCURRENCY if of_installation else WEBHOOK_ENDPOINT_CONCURRENCY


def take_ready(busy: int, after: str = "") -> tuple[list[Delivery], bool, str]:
    """Claim what this process should send now, to endpoints with ids above ``after``; ``busy`` of its slots are taken.
    Returns the claimed deliveries, with their endpoints; whether some process could claim any; and the next ``after``,
    which is empty at the end.
    """
    with connection.cursor() as cursor:
        cursor.execute(_CANDIDATES, [after, CANDIDATES_MAX, connection.ops.adapt_datetimefield_value(clock.now())])
        rows = [Candidate(*row) for row in cursor.fetchall()]
    after = max(row.endpoint_id for row in rows) if len(rows) == CANDIDATES_MAX else ""
    rows = [row for row in rows if not row.is_dropping]
    if closed := [row.endpoint_id for row in rows if not row.is_open]:
        transitions.drop(closed)
        transitions.pass_on_due()
    candidates = [row for row in rows if row.is_open and row.in_flight < concurrency(row.of_installation)]
    allowances = allocate_slots(candidates, busy, WEBHOOK_WORKER_CAPACITY, WEBHOOK_BATCH_SIZE)
    return _claim(allowances) if allowances else [], bool(candidates), after


def allocate_slots(candidates: Sequence[Candidate], busy: int, slots: int, most: int) -> dict[str, int]:
    """How many attempts each endpoint may start, by endpoint id. An endpoint gets a slot while fewer slots than its
    share are taken. The share depends on whether its last attempt succeeded, and is smaller for further attempts at the
    same time. So an endpoint that answers waits neither for 200 receivers that hang nor for one with a long queue.
    """
    first_share = {False: slots, None: slots * 3 // 4, True: slots // 2}
    further_share = {False: slots // 2, None: slots // 4, True: slots // 4}
    starts = [
        (already, row) for row in candidates for already in range(row.in_flight, concurrency(row.of_installation))
    ]
    given: list[str] = []
    for already, row in sorted(starts, key=itemgetter(0)):  # endpoints with the fewest attempts first
        share = further_share if already else first_share
        # In a small pool, each share is still one slot.
        if len(given) < most and busy + len(given) < max(share[row.failing], 1):
            given.append(row.endpoint_id)
    return Counter(given)


@transaction.atomic
def _claim(allowances: dict[str, int]) -> list[Delivery]:
    now = clock.now()
    sendable = Endpoint.objects.filter(pk__any_of=list(allowances), enabled=True, deleted_at=None, drop_until=None)
    endpoints = {endpoint.pk: endpoint for endpoint in sendable.select_for_update(no_key=True, skip_locked=True)}
    if not endpoints:
        return []
    sql = _DUE.format(join="string_agg" if connection.vendor == "postgresql" else "group_concat", any_of=any_of())
    most, moment = max(concurrency(False), concurrency(True)), connection.ops.adapt_datetimefield_value(now)
    due: list[str] = []
    with connection.cursor() as cursor:
        # Under the lock, attempts are counted again: no other process can claim meanwhile.
        cursor.execute(sql, [most, moment, array(endpoints)])
        for endpoint_id, keys, in_flight in cursor.fetchall():
            free = concurrency(endpoints[endpoint_id].user_id is None) - in_flight
            allowed = min(free, allowances[endpoint_id])
            due += (keys or "").split()[: max(allowed, 0)]
    ready = Delivery.objects.filter(pk__any_of=due, status=Delivery.Status.PENDING, ready=True)
    deliveries = list(ready.select_for_update(no_key=True, skip_locked=True).order_by("next_attempt_at", "pk"))
    for delivery in deliveries:
        delivery.endpoint = endpoints[delivery.endpoint_id]
    transitions.claim(deliveries, new_id("clm"), now)
    return deliveries
