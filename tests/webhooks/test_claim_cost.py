"""A claim costs what is ready: the pages that PostgreSQL reads, by its own count."""

import json
from contextlib import closing

import pytest
from django.db import connection

from tests import factories
from tests.webhooks.conftest import record
from webhooks import claims, transitions

pytestmark = pytest.mark.django_db

ENDPOINTS = 5_000
FILL = """
    INSERT INTO webhooks_delivery (id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, body,
        status, attempt_count, ready, next_attempt_at, finished_at, created_at)
    SELECT 'dlv_' || %(mark)s::varchar || row_number() OVER (), 'evt_' || %(mark)s::varchar || row_number() OVER (),
        e.id, e.user_id, 'agent.started', 'run', 'chat', '{}', %(status)s::varchar, 1, %(ready)s,
        CASE WHEN %(status)s::varchar = 'PENDING' THEN now() + interval '1 hour' END,
        CASE WHEN %(status)s::varchar <> 'PENDING' THEN now() END, now()
    FROM (SELECT * FROM webhooks_endpoint ORDER BY id LIMIT %(endpoints)s) e, generate_series(1, %(each)s)
"""
USERS = """
    INSERT INTO auth_user (username, password, is_superuser, first_name, last_name, email, is_staff, is_active,
        date_joined)
    SELECT 'waits-' || n, '', false, '', '', '', false, true, now() FROM generate_series(1, %s) n
"""
ENDPOINT_OF_EACH = """
    INSERT INTO webhooks_endpoint (id, user_id, url, secret, enabled)
    SELECT 'whe_' || lpad(id::text, 9, '0'), id, 'http://127.0.0.1:9/', '', true
    FROM auth_user WHERE username LIKE 'waits-%%'
"""


@pytest.fixture
def endpoints():
    if connection.vendor != "postgresql":
        pytest.skip("about PostgreSQL's plans")
    # What other tests rolled back still fills pages of the indexes, which a search would read.
    with closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute("VACUUM webhooks_delivery, webhooks_endpoint")
    with connection.cursor() as cursor:
        cursor.execute(USERS, [ENDPOINTS])
        cursor.execute(ENDPOINT_OF_EACH)


def fill(mark: str, endpoints: int, each: int, *, ready: bool, status: str = "PENDING") -> None:
    with connection.cursor() as cursor:
        cursor.execute(FILL, {"mark": mark, "endpoints": endpoints, "each": each, "ready": ready, "status": status})


def analyse() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE webhooks_delivery")
        cursor.execute("ANALYZE webhooks_endpoint")


def pages_read(statement: str, *parameters: object) -> int:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        plan = cursor.fetchone()[0]
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]


def search_pages() -> int:
    return pages_read(claims._CANDIDATES, "", claims.CANDIDATES_MAX, "2026-01-01T00:00:00Z")


def test_search_reads_nothing_of_endpoints_that_wait(endpoints):
    fill("w", ENDPOINTS, 4, ready=False)
    for statistics in ("of an empty table", "right"):
        if statistics == "right":
            analyse()
        assert claims.take_ready(0) == ([], False, "")
        assert search_pages() < 20, statistics
        assert pages_read(transitions._ANYTHING, "2026-01-01T00:00:00Z") < 20, statistics


def test_search_costs_one_step_for_each_endpoint_and_no_more_than_its_limit(endpoints):
    fill("h", 1, 20_000, ready=True)
    fill("r", 300, 1, ready=True)
    fill("d", ENDPOINTS, 2, ready=False, status="DELIVERED")
    analyse()
    # A step is a few pages of indexes, and three probes for the endpoint that was found.
    assert search_pages() < 300 * 25
    assert len({claim.endpoint_id for claim in claims.take_ready(0)[0]}) == 200
    fill("m", ENDPOINTS, 1, ready=True)
    analyse()
    assert search_pages() < claims.CANDIDATES_MAX * 25


def test_every_endpoint_is_reached_in_its_turn(monkeypatch):
    """More endpoints are ready than one search considers."""
    monkeypatch.setattr(claims, "CANDIDATES_MAX", 3)
    expected = set()
    for number in range(7):
        endpoint = factories.EndpointFactory()
        expected.add(endpoint.pk)
        for _ in range(1 + number % 2):
            record(endpoint.user)
    found, after = [], ""
    for _ in range(3):
        taken, _, after = claims.take_ready(0, after)
        found += [claim.endpoint_id for claim in taken]
    assert set(found) == expected
    assert after == ""
