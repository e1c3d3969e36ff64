"""The dashboard's health strip and times, and the reports of what was spent."""

import csv
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Sum
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from config.api import metrics_page
from config.kernel import clock
from config.kernel.money import MICRO
from config.telemetry.metrics import Gauge
from credits import ledger
from credits.models import CHARGES, LedgerEntry
from runs.admin import dashboard, reports
from runs.models import AgentModel, Tool
from tests import factories
from tests.admin.conftest import make_run
from tests.admin.test_find import scans
from tests.credits.helpers import fund, spend

pytestmark = pytest.mark.django_db

REPORTS = reverse("reports")


@pytest.fixture
def reading(monkeypatch) -> metrics_page.Reading:
    """What the processes report: all is well."""
    found = metrics_page.Reading(up={"redis": True, "database": True})
    found.gauges = [Gauge("run_workers", "", {(): 2.0}), Gauge("runs_oldest_queued_seconds", "", {(): 0.0})]
    found.ends = {("sweep-runs",): clock.now().timestamp() - 5}
    monkeypatch.setattr(metrics_page, "reading", lambda: found)
    return found


def parts() -> dict[str, dict[str, str]]:
    return {part["label"]: part for part in dashboard.health()}


def test_a_healthy_service_needs_no_runbook(reading):
    assert {part["value"]: part["tone"] for part in parts().values()} == {
        "2": "success", "works": "success", "answers": "success", "none waits": "success", "none": "success",
    }  # fmt: skip
    assert {part["runbook"] for part in parts().values()} == {""}


def test_each_part_that_fails_leads_to_its_runbook(reading):
    chat = factories.ChatFactory()
    stuck = factories.RunFactory(chat=chat, status="queued", created_at=clock.now() - timedelta(minutes=3))
    failed = make_run(chat.user, status="failed", error_code="MODEL_ERROR", failure_reason="provider_unauthorized")
    reading.up["redis"] = False
    reading.gauges = [Gauge("run_workers", "", {(): 0.0}), Gauge("runs_oldest_queued_seconds", "", {(): 185.0})]
    found = parts()
    assert (found["Workers"]["value"], found["Workers"]["tone"]) == ("0", "danger")
    assert found["Beat"]["value"] == "not known without Redis"
    assert found["Redis"]["tone"] == "danger"
    assert found["Oldest queued run"]["value"] == "waits 3 min 5 s"
    assert stuck.pk in found["Oldest queued run"]["link"]
    assert found["Last error"]["value"].startswith("provider_unauthorized, ")
    assert failed.pk in found["Last error"]["link"]
    reading.up["redis"] = True
    reading.ends = {("sweep-runs",): clock.now().timestamp() - 900}
    assert parts()["Beat"]["value"] == "silent for 15 min 0 s"


def test_every_runbook_is_a_section_of_the_documentation(reading, settings):
    reading.up["redis"] = False
    reading.gauges = [Gauge("runs_oldest_queued_seconds", "", {(): 100.0})]
    make_run(factories.UserFactory(), status="failed", error_code="MODEL_ERROR")
    headings = (settings.BASE_DIR / "docs" / "operations.md").read_text().lower()
    anchors = {part["runbook"].partition("#")[2] for part in dashboard.health()} | {"housekeepingstale"}
    assert all(f"### {anchor}\n" in headings for anchor in anchors)


def test_times_of_runs():
    now = clock.now()
    for second in range(1, 21):
        at = now - timedelta(seconds=100)
        started = at + timedelta(seconds=second)
        # It ran for two seconds and waited for its user for an hour.
        ended = started + timedelta(hours=1)
        factories.RunFactory(created_at=at, started_at=started, finished_at=ended, ran_ms=2000)
    assert dashboard.times() == {
        "facts": [
            ("Start delay p50", "10.0 s"),
            ("Start delay p95", "19.0 s"),
            ("Latency p50", "12.0 s"),
            ("Latency p95", "21.0 s"),
        ],
        "count": 20,
    }


def test_a_wait_behind_an_earlier_run_of_the_chat_is_no_start_delay():
    """Nor is a wait behind one that was cancelled in line."""
    at, chat = clock.now() - timedelta(seconds=100), factories.ChatFactory()

    def after(seconds: int) -> datetime:
        return at + timedelta(seconds=seconds)

    for created, started, finished in ((0, 1, 60), (1, None, 30), (2, 63, 65)):
        factories.RunFactory(
            chat=chat,
            status="completed" if started else "cancelled",
            created_at=after(created),
            started_at=started and after(started),
            finished_at=after(finished),
            ran_ms=1000,
        )
    facts = dict(dashboard.times()["facts"])
    assert (facts["Start delay p50"], facts["Start delay p95"]) == ("1.0 s", "3.0 s")
    assert (facts["Latency p50"], facts["Latency p95"]) == ("2.0 s", "4.0 s")


# --- reports ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def spent() -> Any:
    ada, eve = factories.UserFactory(username="ada"), factories.UserFactory(username="\uff1deve()")
    for user, amount, tool in ((ada, 3, "draw"), (eve, 5, "search"), (ada, 4, "search")):
        fund(user, 100 * MICRO)
        spend(user, amount * MICRO, tool=tool)
    make_run(ada)
    return ada


def test_the_reports_add_up_to_the_ledger(spent, boss):
    """With the charge of a summary, of a turn whose worker was lost, and of the tools of an agent's run."""
    run = make_run(spent, agent="support@2", agent_name="support")
    for number, price in enumerate(({"model": "gpt"}, {"model": "demo", "partial": True}), 9):
        hold = ledger.hold(
            spent.pk, 3 * MICRO, cause=f"turn:{run.pk}:{number}", run_id=run.pk, chat_id=run.chat_id, price={}
        )
        ledger.settle(hold, number * MICRO // 4, price=price)
    rows = LedgerEntry.objects.filter(type__in=CHARGES)
    ledger.refund(rows.first().pk, 1, reason="x", staff=boss.person)
    said = {
        name: {row.name: (row.amount, row.records) for row in report.read(7, 10)}
        for name, report in reports.REPORTS.items()
    }
    assert said == {
        "user": {"ada": (15_250_000, 8), "\uff1deve()": (5 * MICRO, 1)},
        "tool": {"Search": (9 * MICRO, 2), "Model usage": (5_750_000, 4), "Draw": (3 * MICRO, 1),
                 "Calculate": (2_500_000, 2)},
        "model": {"demo": (3_500_000, 3), "gpt": (2_250_000, 1)},
        "agent": {"No agent": (13_750_000, 5), "support": (6_500_000, 4)},
    }  # fmt: skip

    def whole(name: str) -> tuple[int, int]:
        return sum(amount for amount, _ in said[name].values()), sum(count for _, count in said[name].values())

    total = rows.aggregate(total=Sum("amount"))["total"], rows.count()
    assert whole("user") == whole("tool") == whole("agent") == total
    assert whole("model") == said["tool"]["Model usage"]


def test_cost_and_margin_follow_from_the_catalogue(sign_in, spent):
    AgentModel.objects.filter(name="demo").update(provider_cost_percent=62.5)
    Tool.objects.create(name="search", node_type="http", price=0, provider_cost_percent=150)
    assert [(row.name, row.cost, row.margin) for row in reports.by_model(7, 10)] == [("demo", 312_500, 187_500)]
    tools = {row.name: (row.cost, row.margin) for row in reports.by_tool(7, 10)}
    assert tools["Search"] == (13_500_000, -4_500_000)
    assert tools["Draw"] == tools["Model usage"] == (None, None)
    viewer = sign_in("viewer")
    answer = viewer.get(REPORTS, {"by": "tool", "days": "7", "as": "csv"})
    lines = list(csv.reader(answer.content.decode().splitlines()))
    assert lines[:3] == [
        ["tool", "credits", "charges", "provider cost", "margin"],
        ["Search", "9", "2", "13.5", "-4.5"],
        ["Draw", "3", "1", "", ""],
    ]
    for page in (viewer.get(REPORTS, {"by": "tool"}), viewer.get(reverse("admin:index"))):
        assert "Margin" in page.content.decode()
        assert '<td class="num">13.5</td><td class="num">-4.5</td>' in page.content.decode()
        assert '<td class="num">–</td><td class="num">–</td>' in page.content.decode()


def test_a_report_is_a_page_and_a_file(sign_in, spent):
    viewer = sign_in("viewer")
    page = viewer.get(REPORTS, {"by": "user", "days": "7"}).content.decode()
    assert "8.75" in page
    assert reverse("person", args=[spent.pk]) in page
    answer = viewer.get(REPORTS, {"by": "user", "days": "7", "as": "csv"})
    assert answer["Content-Type"].startswith("text/csv")
    assert list(csv.reader(answer.content.decode().splitlines())) == [
        ["user", "credits", "charges"],
        ["ada", "8.75", "4"],
        ["'\uff1deve()", "5", "1"],  # no formula
    ]
    for odd in ({"by": "x"}, {"days": "-1"}, {"days": "9" * 50}, {"by": "\0", "days": "\0"}):
        assert viewer.get(REPORTS, odd).status_code == 200


def test_a_report_needs_its_permission(sign_in, spent):
    assert sign_in().get(REPORTS).status_code == 403
    turns = sign_in(permissions=("runs.view_turn",))
    assert turns.get(REPORTS, {"by": "user"}).context["by"] == "model"


@pytest.mark.parametrize("report", reports.REPORTS.values())
def test_who_may_open_a_report_finds_it_in_the_sidebar(sign_in, report):
    page = sign_in(permissions=report.permissions).get(reverse("admin:index"))
    assert "Reports" in [item["title"] for group in page.context["sidebar_navigation"] for item in group["items"]]
    stranger = sign_in(permissions=("runs.view_run",)).get(reverse("admin:index"))
    assert "Reports" not in [
        item["title"] for group in stranger.context["sidebar_navigation"] for item in group["items"]
    ]


def test_the_sidebar_marks_only_the_report(boss):
    page = boss.get(REPORTS)
    marked = [
        item["title"] for group in page.context["sidebar_navigation"] for item in group["items"] if item["active"]
    ]
    assert marked == ["Reports"]


@pytest.mark.parametrize("by", reports.REPORTS)
def test_a_report_takes_a_fixed_number_of_queries_that_use_indexes(boss, spent, by):
    def queries() -> list[str]:
        with CaptureQueriesContext(connection) as asked:
            boss.get(REPORTS, {"by": by})
        return [query["sql"] for query in asked.captured_queries if query["sql"].startswith("SELECT")]

    queries()
    before = queries()
    make_run(factories.UserFactory())
    assert len(queries()) == len(before) <= 6
    for sql in before:
        assert not scans(sql), sql
