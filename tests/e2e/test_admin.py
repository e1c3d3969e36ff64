"""The admin in a real browser: find a run, read its timeline, cancel it, grant credits. Staff answer the questions that
they are asked often within two clicks from the dashboard. axe-core finds nothing serious on any kind of page, none is
wider than a phone, and none breaks its Content-Security-Policy.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.driver import Driver
from tests.stack.accessibility import DESK, PHONE, problems, serious_problems, wider
from tests.stack.browser import browsing
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services]

# Each visit reads the dashboard's numbers.
SETTINGS = {"runs.admin.dashboard.ADMIN_DASHBOARD_SECONDS": "0", "config.settings.METRICS_CACHE_SECONDS": "0"}
PASSWORD = "correct horse battery"
MAKE_STAFF = f"""
from django.contrib.auth.models import Group, User
for name, roles in {{"olga": ["support", "billing"], "vera": ["viewer"]}}.items():
    person = User.objects.create_user(name, f"{{name}}@example.com", "{PASSWORD}", is_staff=True)
    person.groups.set(Group.objects.filter(name__in=roles))
User.objects.create_superuser("root", "root@example.com", "{PASSWORD}")
"""
# The queued run has waited, and the lease of the worker that was killed is over.
LET_WAIT = """
from datetime import timedelta
from config.kernel import clock
from runs.models import Run, Worker
Run.objects.update(updated_at=clock.now() - timedelta(minutes=5))
Worker.objects.update(expires_at=clock.now() - timedelta(minutes=1))
"""
# The rule that depends on the width. The parts that only a phone shows are the same on all pages.
OF_WIDTH = "scrollable-region-focusable"
# Rows with all that pages may show, and long names.
PREPARE = """
from django.contrib.auth.models import User
from apikeys import keys
from credits import ledger
from credits.models import LedgerEntry
from runs.catalogue import agents
from runs.models import Agent, AgentModel, Run, Tool
from tests import factories
ada = User.objects.get(username="ada")
failed = Run.objects.get(user_id=ada.pk, status="failed")
endpoint = factories.EndpointFactory(user=ada, enabled=False)
delivery = factories.DeliveryFactory(
    endpoint=endpoint, run_id=failed.pk, chat_id=failed.chat_id, status="DEAD", attempt_count=2)
factories.AttemptFactory(delivery=delivery)
key, _ = keys.create_key(ada, name="ci")
for text in ("Help.", "Help well."):
    agents.save("support", display_name="Support", instructions=text)
long = User.objects.create(username="auth0|" + "W" * 144)
factories.RunFactory(chat=factories.ChatFactory(user=long), agent_name="a" * 64, resolved_model="m" * 100)
ledger.grant(long.pk, 999_999_999_123_456, cause="long", reason="r" * 500)
tool = Tool.objects.create(name="weather", description="Weather.", node_type="http", price=1,
    url="https://example.com/", provider_cost_percent=40)
charge = LedgerEntry.objects.filter(type="CAPTURE", account=ada.pk).first()
print("rows", long.pk, ada.pk, key.pk, Agent.objects.get().pk, AgentModel.objects.get(name="demo").pk, tool.pk,
    charge.pk, delivery.pk)
"""
LOCK = """
from axes.models import AccessAttempt
AccessAttempt.objects.create(username="x", ip_address="127.0.0.1", user_agent="x", failures_since_start=99)
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(**given_services(), environment=SETTINGS) as running:
        running.manage("shell", "-c", MAKE_STAFF)
        yield running


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    # Navigation to another page aborts the unfinished requests of the previous page.
    with browsing(browser, stack.url, "/admin/", viewport={"width": 1440, "height": 900}) as page:
        yield page


@pytest.fixture(scope="module")
def ada(stack: Stack) -> dict[str, Any]:
    """The runs of ada: one with a charge of 12 credits that she approved, and one that failed."""
    ada = Driver(stack.session("ada"))
    run = ada.ask('/call draw_chart {"title": "T", "series": [3, 1]}\n/say done')
    ada.respond(run, kind="CREDIT_APPROVAL", approved=True)
    ada.wait(run["id"])
    return {"charged": run["id"], "failed": ada.finish("/fail out of order")}


def sign_in(page: Page, name: str) -> None:
    page.fill("#id_username", name)
    page.fill("#id_password", PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("Oldest queued run").first).to_be_visible()


def test_staff_find_read_and_cancel_runs(stack: Stack, page: Page) -> None:
    eve = stack.session("eve")
    eve.post("/webhooks", {"url": "http://127.0.0.1:9/nobody"})
    ask = '/call calculate {"expression": "6*7"}\n/ask Which?'
    run, *others = [Driver(eve).ask(message)["id"] for message in (ask, "/ask Which?", "/ask Which?")]
    sign_in(page, "olga")
    assert page.locator("canvas.chart").count() >= 1
    page.locator('a[href="/admin/runs/run/"]').first.click()
    page.fill("#searchbar", "eve")
    page.keyboard.press("Enter")
    page.get_by_title(run, exact=True).click()
    for piece in ("Turn 1", "calculate", "Clarification", "waiting", "agent.started"):
        expect(page.locator("#content-main").get_by_text(piece).first).to_be_visible()
    bars = page.locator(".staff-track i")
    assert bars.count() >= 5
    assert all((bars.nth(number).bounding_box() or {"width": 0})["width"] > 0 for number in range(bars.count()))
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("button", name="Yes, cancel").click()
    expect(page.locator(".staff-head .staff-pill").first).to_have_text("cancelled")
    expect(page.get_by_role("link", name="Cancel")).to_have_count(0)
    assert eve.get(f"/runs/{run}").json()["status"] == "cancelled"
    page.locator('a[href$="/history/"]').click()
    expect(page.get_by_text("Cancelled.")).to_be_visible()

    page.goto(f"{stack.url}/admin/runs/run/?q=eve&status__exact=waiting")
    for number in range(len(others)):
        page.locator("input.action-select").nth(number).check()
    page.locator("select[name=action]").select_option("cancel")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Yes, cancel").click()
    expect(page.get_by_text("2 done: Cancel.")).to_be_visible()
    assert {eve.get(f"/runs/{other}").json()["status"] for other in others} == {"cancelled"}


def test_staff_grant_credits_and_an_invalid_amount_is_rejected(stack: Stack, page: Page) -> None:
    """The form, its errors and the confirmation are accessible."""
    bob, found = stack.session("bob"), {}
    before = bob.get("/me/credits").json()["available"]
    sign_in(page, "olga")
    page.goto(f"{stack.url}/admin/credits/account/")
    page.get_by_role("link", name="Grant credits").click()
    page.fill("[name=user]", "bob")
    page.fill("[name=amount]", "-5")
    page.fill("[name=reason]", "Sorry for Monday")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("must be at least")).to_be_visible()
    found["error"] = everywhere(page)
    page.fill("[name=amount]", "12.5")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("The credits can be spent at once.")).to_be_visible()
    assert bob.get("/me/credits").json()["available"] == before
    found["confirmation"] = everywhere(page)
    page.get_by_role("button", name="Yes, grant credits").click()
    expect(page.get_by_text("Granted 12.5: Sorry for Monday")).to_be_visible()
    assert float(bob.get("/me/credits").json()["available"]) == float(before) + 12.5
    assert found == {"error": [], "confirmation": []}


def test_calendars_the_theme_and_charts_work_under_the_content_security_policy(stack: Stack, page: Page) -> None:
    """The browser logs an error for anything that the policy blocks. The ``page`` fixture fails on such errors."""
    sign_in(page, "root")
    page.goto(f"{stack.url}/admin/auth/user/?q=olga")
    page.get_by_role("link", name="olga", exact=True).click()
    page.get_by_role("link", name="Sign-in and roles").click()
    # Django's calendar, which a script creates.
    page.locator(".datetimeshortcuts a:has(.date-icon)").first.click()
    expect(page.locator(".calendarbox").first).to_be_visible()
    # The theme and the charts, which need Alpine and Chart.js.
    page.goto(f"{stack.url}/admin/")
    page.locator("a", has_text="Dark").evaluate("link => link.click()")
    expect(page.locator("html")).to_have_class(re.compile(r"\bdark\b"))
    drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"
    assert page.locator("canvas.chart").first.evaluate(drawn)


# --- the questions that staff are asked, for the role that may see least ---------------------------------------------
def find(page: Page, stack: Stack, words: str) -> None:
    page.goto(f"{stack.url}/admin/")
    page.get_by_label("Find a user or an id").last.fill(words)
    page.keyboard.press("Enter")


def test_why_was_this_user_charged_and_why_did_this_run_fail(stack: Stack, page: Page, ada: dict[str, Any]) -> None:
    sign_in(page, "vera")
    find(page, stack, "ada")
    page.get_by_role("link", name="Ledger", exact=True).last.click()
    answer = re.compile(r"12 credits for draw_chart, approved by ada \d\d:\d\d:\d\d")
    expect(page.get_by_text(answer).first).to_be_visible()
    find(page, stack, ada["failed"]["id"])
    expect(page.locator(".staff-error")).to_contain_text(ada["failed"]["errorCode"])


def test_is_the_queue_stuck(stack: Stack, page: Page) -> None:
    """If no worker takes a run, the health strip says so, and leads to the run and to what one can do."""
    sign_in(page, "vera")
    health = page.get_by_label("Health")
    workers, oldest = (health.locator("li", has_text=name) for name in ("Workers", "Oldest queued run"))
    expect(health).to_contain_text("answers")
    expect(oldest).to_contain_text("none waits")
    expect(workers.locator(".staff-pill")).to_have_class(re.compile("success"))
    stack.kill("runs-1")
    try:
        run = Driver(stack.session("dan")).start("/say hello")
        stack.manage("shell", "-c", LET_WAIT)
        page.reload()
        expect(workers.locator(".staff-pill")).to_have_class(re.compile("danger"))
        expect(oldest).to_contain_text(re.compile("waits [56] min"))
        expect(oldest.locator("a").first).to_have_attribute("href", re.compile(run["id"]))
        for part, section in ((oldest, "runsnottaken"), (workers, "norunworkers")):
            part.get_by_role("link", name=re.compile("What to do")).click()
            expect(page).to_have_url(re.compile(rf"/docs/operations/?#{section}$"))
            page.go_back()
    finally:
        stack.restart("runs-1")


# --- accessibility ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def addresses(stack: Stack, ada: dict[str, Any]) -> dict[str, list[str]]:
    """``kinds``: a page of each kind, with all that it may show. ``alike``: others made of the same parts."""
    printed = stack.manage("shell", "-v0", "-c", PREPARE)
    rows = re.search("^rows (.*)$", printed, re.M)
    assert rows, printed
    long, user, key, agent, model, tool, charge, delivery = rows[1].split()
    kinds = [
        "/admin/",
        f"/admin/people/{user}/",
        "/admin/reports/?by=tool",
        "/admin/find/?q=nobody",
        "/admin/runs/run/",
        f"/admin/runs/run/{ada['charged']}/change/",
        f"/admin/runs/run/{ada['charged']}/content/",
        "/admin/credits/ledgerentry/?holds=all",
        f"/admin/credits/ledgerentry/{charge}/change/",
        f"/admin/runs/tool/{tool}/change/",
        f"/admin/runs/tool/{tool}/try/",
        f"/admin/runs/tool/{tool}/delete/",
        f"/admin/runs/agent/{agent}/versions/",
        f"/admin/apikeys/apikey/{key}/do/narrow/",
    ]
    alike = [
        "/admin/runs/run/?q=nobody",
        f"/admin/runs/run/{ada['failed']['id']}/change/",
        f"/admin/people/{long}/",
        "/admin/webhooks/endpoint/",
        "/admin/runs/tool/",
        "/admin/auth/user/",
        f"/admin/webhooks/delivery/{delivery}/change/",
        f"/admin/runs/agent/{agent}/change/",
        f"/admin/auth/user/{user}/change/",
        "/admin/auth/user/add/",
        "/admin/auth/group/add/",
        f"/admin/runs/tool/{tool}/history/",
        "/admin/runs/tool/import/",
        f"/admin/runs/agentmodel/{model}/test/",
        f"/admin/auth/user/{user}/do/erase/",
        f"/admin/credits/ledgerentry/{charge}/do/refund/",
        "/admin/webhooks/endpoint/do/installation/",
        "/admin/password_change/",
    ]
    return {"kinds": kinds, "alike": alike}  # fmt: skip


def one_main(page: Page) -> list[str]:
    return [] if page.locator("main").count() == 1 else ["not one main"]


def everywhere(page: Page) -> list[str]:
    """What is wrong with the page at a desk, on a phone and in the dark."""
    return one_main(page) + problems(page, OF_WIDTH, dark="dark")


def at_a_desk(page: Page) -> list[str]:
    """What is wrong with a page like others: its elements, in colours that the others have, and its width."""
    page.set_viewport_size(DESK)
    return one_main(page) + serious_problems(page) + wider(page, PHONE)


@pytest.mark.timeout(600)
def test_every_kind_of_page_is_accessible(stack: Stack, page: Page, addresses: dict[str, list[str]]) -> None:
    found: dict[str, list[str]] = {}
    sign_in(page, "root")
    page.set_viewport_size(PHONE)
    found["the parts of every page, on a phone"] = serious_problems(page)
    for check, kind in ((everywhere, "kinds"), (at_a_desk, "alike")):
        for address in addresses[kind]:
            answer = page.goto(stack.url + address)
            assert answer is not None
            assert answer.status == 200, address
            found[address] = check(page)
    assert {address: wrong for address, wrong in found.items() if wrong} == {}


def test_signing_in_errors_and_the_lock_are_accessible(browser: Browser, stack: Stack) -> None:
    found: dict[str, list[str]] = {}
    # The browser logs the statuses 404 and 429 as errors.
    with browsing(browser, stack.url, "/admin/", viewport=DESK, tolerated="status of 4") as page:
        page.emulate_media(color_scheme="dark")
        page.reload()
        expect(page.locator("html")).to_have_class(re.compile(r"\bdark\b"))
        page.emulate_media(color_scheme="light")
        page.reload()
        found["signing in"] = everywhere(page)
        stack.manage("shell", "-v0", "-c", LOCK)
        try:
            page.fill("#id_username", "root")
            page.fill("#id_password", PASSWORD)
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("heading", name="Too many attempts")).to_be_visible()
            found["locked"] = everywhere(page)
        finally:
            stack.manage("axes_reset")
        page.goto(f"{stack.url}/admin/")
        sign_in(page, "root")
        page.goto(f"{stack.url}/admin/nothing/")
        expect(page.get_by_role("heading", name=re.compile("not found", re.I)).first).to_be_visible()
        found["no such page"] = everywhere(page)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
