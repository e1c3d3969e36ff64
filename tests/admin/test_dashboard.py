"""The dashboard's metrics: their values, their cache and their use of indexes."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.cache import cache
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from ulid import ULID

from config.kernel.ids import first_id, new_id
from config.kernel.money import MICRO
from credits import ledger
from credits.models import LedgerEntry
from runs.admin import dashboard
from tests import factories
from tests.admin.test_find import scans
from tests.credits.helpers import stop_clock

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 20, 15, 30, tzinfo=UTC)


@pytest.fixture(autouse=True)
def stopped(monkeypatch):
    return stop_clock(monkeypatch, NOW)


def id_at(prefix: str, moment: datetime) -> str:
    return f"{prefix}_{str(ULID.from_datetime(moment)).lower()}"


def run_at(moment: datetime, **fields: Any) -> Any:
    return factories.RunFactory(id=id_at("run", moment), created_at=moment, **fields)


def series(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {label of the series: {label of the bar: value}} without zeros."""
    data = json.loads(panel["data"])
    return {
        one["label"]: {label: value for label, value in zip(data["labels"], one["data"], strict=True) if value}
        for one in data["datasets"]
    }


def test_the_first_id_of_a_moment_is_not_above_other_ids_of_it():
    moment = datetime.now(UTC)
    assert first_id("run", moment) <= new_id("run") < first_id("run", moment + timedelta(hours=1))


def test_runs_by_state_and_hour():
    run_at(NOW, status="failed", error_code="MODEL_ERROR")
    run_at(NOW - timedelta(minutes=29), status="completed")
    run_at(NOW - timedelta(minutes=31), status="completed")
    run_at(datetime(2026, 11, 19, 16, 0, tzinfo=UTC), status="cancelled")
    run_at(datetime(2026, 11, 19, 15, 59, tzinfo=UTC), status="cancelled")  # outside the chart of 24 hours
    found = dashboard.runs_by_hour()
    assert series(found) == {"completed": {"15:00": 1, "14:00": 1}, "failed": {"15:00": 1}, "cancelled": {"16:00": 1}}
    assert found["total"] == "4 runs"


def test_live_runs():
    run_at(NOW - timedelta(minutes=3, seconds=5), status="queued")
    run_at(NOW, status="queued", blocked=False)
    run_at(NOW - timedelta(hours=3), status="waiting")
    run_at(NOW - timedelta(hours=3), status="running", parked=True)
    found = dashboard.runs_now()
    shown = {"Queued": "2", "Running": "1", "Waiting": "1", "Parked": "1"}
    assert {tile["label"]: tile["value"] for tile in found} == shown


def test_credits_by_day_and_tool_equal_the_usage_reports(user, monkeypatch):
    def spend_at(moment: datetime, tool: str | None, amount: int) -> None:
        common = {"account": ledger.account_for(user.pk), "amount": amount, "tool_key": tool, "created_at": moment}
        hold = LedgerEntry.objects.create(id=id_at("led", moment), type="HOLD", cause=new_id("cause"), **common)
        LedgerEntry.objects.create(
            id=id_at("led", moment), type="CAPTURE" if tool else "USAGE", against=hold, cause=new_id("cause"), **common
        )

    spend_at(NOW, "draw_chart", 12 * MICRO)
    spend_at(NOW - timedelta(hours=15), None, MICRO // 2)
    spend_at(NOW - timedelta(hours=16), "draw_chart", 3 * MICRO)
    spend_at(datetime(2026, 11, 7, tzinfo=UTC), "calculate", MICRO)
    spend_at(datetime(2026, 11, 6, 23, 59, 59, tzinfo=UTC), "calculate", MICRO)
    monkeypatch.setattr(dashboard, "TOOLS_SHOWN", 2)
    found = dashboard.credits_by_day()
    assert series(found) == {
        "Draw a chart": {"20 Nov": 12.0, "19 Nov": 3.0},
        "Calculate": {"07 Nov": 1.0},
        "Others": {"20 Nov": 0.5},
    }
    assert found["total"] == "16.5 credits"


def test_failures_by_error_code():
    for code, count in (("MODEL_ERROR", 4), ("RUN_TIMEOUT", 1)):
        for number in range(count):
            run_at(NOW - timedelta(days=number), status="failed", error_code=code)
    run_at(NOW - timedelta(days=8), status="failed", error_code="WORKER_LOST")
    found = dashboard.failure_codes()
    assert [(row["code"], row["count"], row["share"]) for row in found] == [
        ("MODEL_ERROR", "4", 100.0),
        ("RUN_TIMEOUT", "1", 25.0),
    ]


def test_webhook_health(user):
    endpoint = factories.EndpointFactory(user=user, failing=True)

    def send(moment: datetime, **fields: Any) -> None:
        factories.DeliveryFactory(id=id_at("dlv", moment), endpoint=endpoint, created_at=moment, **fields)

    send(NOW, attempt_count=1)
    send(NOW, attempt_count=2)
    send(NOW - timedelta(hours=1), attempt_count=5, status="DEAD")
    send(NOW, status="PENDING", next_attempt_at=NOW - timedelta(seconds=90), finished_at=None)
    send(NOW - timedelta(days=2), attempt_count=1)
    found = dashboard.webhook_health()
    facts = {label: value for label, value, _ in found["facts"]}
    assert facts == {
        "Delivered": "50.0%",
        "Tried more than once": "2",
        "Dead": "1",
        "Pending": "1",
        "Longest overdue": "1 min 30 s",
        "Failing endpoints": "1",
    }
    assert series(found) == {"delivered": {"15:00": 2}, "pending": {"15:00": 1}, "dead": {"14:00": 1}}


def test_each_panel_requires_its_permission(sign_in):
    texts = {
        "runs.view_run": "Runs by state",
        "credits.view_ledgerentry": "Credits a day",
        "webhooks.view_delivery": "Webhook deliveries",
    }
    for permission in texts:
        page = sign_in(permissions=(permission,)).get(reverse("admin:index")).content.decode()
        assert {text for text in texts.values() if text in page} == {texts[permission]}


def test_the_metrics_are_cached(boss):
    boss.get(reverse("admin:index"))
    with CaptureQueriesContext(connection) as asked:
        boss.get(reverse("admin:index"))
    assert not [query for query in asked.captured_queries if "runs_run" in query["sql"]]
    cache.clear()
    run_at(NOW)
    assert re.search(r"\b1 run\b", boss.get(reverse("admin:index")).content.decode())


class Cancelled(Exception):
    sqlstate = "57014"


def test_a_panel_that_takes_too_long_says_so_beside_the_others(boss, monkeypatch):
    def too_slow(*_: Any) -> Any:
        raise OperationalError from Cancelled()

    slow = {"runs_now", "runs_by_hour", "failure_codes", "credits_by_day", "webhook_health"}
    for name in slow:
        with monkeypatch.context() as patch:
            cache.clear()
            patch.setattr(dashboard, name, too_slow)
            page = boss.get(reverse("admin:index")).content.decode()
            assert page.count("took too long") == 1, name
    cache.clear()
    for name in slow:
        monkeypatch.setattr(dashboard, name, too_slow)
    monkeypatch.setattr(dashboard, "health", too_slow)
    monkeypatch.setattr(dashboard, "times", too_slow)
    for name, report in list(dashboard.reports.REPORTS.items()):
        monkeypatch.setitem(dashboard.reports.REPORTS, name, report._replace(read=too_slow))
    assert boss.get(reverse("admin:index")).content.decode().count("took too long") == len(slow) + 2 + 4


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no time limit")
def test_the_database_ends_a_slow_panel(boss, monkeypatch):
    def sleep() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")

    monkeypatch.setattr("runs.admin.dashboard.ADMIN_PANEL_SECONDS", 0.1)
    assert dashboard.in_time(sleep) == dashboard.SLOW


def test_a_database_that_is_away_is_no_slow_panel(monkeypatch):
    def away() -> None:
        raise OperationalError

    with pytest.raises(OperationalError):
        dashboard.in_time(away)


def test_every_metric_query_uses_an_index(boss, user):
    run_at(NOW, status="failed", error_code="MODEL_ERROR")
    cache.clear()
    with CaptureQueriesContext(connection) as asked:
        boss.get(reverse("admin:index"))
    queries = [query["sql"] for query in asked.captured_queries if re.match("SELECT (?!set_config)", query["sql"])]
    assert len(queries) <= 31
    for sql in queries:
        # The indexes of runs that wait behind others are as short as those lines.
        wrong = [
            step
            for step in scans(sql, browsing=True)
            if not re.search("webhooks_endpoint|run_in_line|run_throttled", step)
        ]
        assert wrong == [], sql
