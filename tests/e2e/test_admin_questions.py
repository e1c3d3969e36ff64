"""Each question that staff are asked often is answered within two clicks from the dashboard, for each role."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.driver import Driver
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services]

PASSWORD = "correct horse battery"
ROLES = ["viewer", "support", "billing"]
MAKE_STAFF = f"""
from django.contrib.auth.models import Group, User
for role in {ROLES}:
    User.objects.create_user(role, f"{{role}}@example.com", "{PASSWORD}", is_staff=True)
    User.objects.get(username=role).groups.set(Group.objects.filter(name=role))
User.objects.create_superuser("root", "root@example.com", "{PASSWORD}")
"""
LET_WAIT = """
from datetime import timedelta
from config.kernel import clock
from runs.models import Run
Run.objects.update(updated_at=clock.now() - timedelta(minutes=5))
"""
SECONDS = 20_000


@pytest.fixture(scope="module")
def staffed(stack: Stack) -> Stack:
    stack.manage("shell", "-c", MAKE_STAFF)
    return stack


@pytest.fixture(scope="module")
def charged(staffed: Stack) -> dict[str, Any]:
    """A run of ada with a charge of 12 credits that she approved, and one that failed."""
    ada = Driver(staffed.session("ada"))
    run = ada.ask('/call draw_chart {"title": "T", "series": [3, 1]}\n/say done')
    ada.respond(run, kind="CREDIT_APPROVAL", approved=True)
    ada.wait(run["id"])
    failed = ada.finish("/fail out of order")
    return {"run": run, "failed": failed}


def signed_in(browser: Browser, staffed: Stack, name: str, **options: Any) -> Page:
    page = browser.new_context(bypass_csp=True, **options).new_page()
    page.goto(f"{staffed.url}/admin/login/?next=/admin/")
    page.fill("#id_username", name)
    page.fill("#id_password", PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("Oldest queued run").first).to_be_visible(timeout=SECONDS)
    return page


@pytest.mark.parametrize("role", ROLES)
def test_why_was_this_user_charged(browser, staffed, charged, role):
    page = signed_in(browser, staffed, role)
    page.get_by_label("Find a user or an id").last.fill("ada")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Ledger", exact=True).last.click()
    answer = re.compile(r"12 credits for draw_chart, approved by ada \d\d:\d\d:\d\d")
    expect(page.get_by_text(answer).first).to_be_visible(timeout=SECONDS)


@pytest.mark.parametrize("role", ROLES)
def test_why_did_this_run_fail(browser, staffed, charged, role):
    page = signed_in(browser, staffed, role)
    page.get_by_label("Find a user or an id").last.fill(charged["failed"]["id"])
    page.keyboard.press("Enter")
    expect(page.locator(".staff-error")).to_contain_text(charged["failed"]["errorCode"], timeout=SECONDS)


@pytest.mark.parametrize("role", ROLES)
def test_is_the_queue_stuck(browser, staffed, charged, role):
    page = signed_in(browser, staffed, role)
    health = page.get_by_label("Health")
    expect(health).to_contain_text("none waits")
    expect(health).to_contain_text("answers")
    expect(health.locator("li", has_text="Workers").locator(".staff-pill")).to_have_class(re.compile("success"))


def test_is_the_queue_stuck_when_it_is(browser, make_stack):
    """No worker takes a run: the health strip says so, and leads to the run and to what one can do."""
    stack = make_stack(run_workers=0, environment={"runs.admin.dashboard.ADMIN_DASHBOARD_SECONDS": "0"})
    stack.manage("shell", "-c", MAKE_STAFF)
    run = Driver(stack.session("ada")).start("/say hello")
    stack.manage("shell", "-c", LET_WAIT)
    for role in ROLES:
        page = signed_in(browser, stack, role)
        health = page.get_by_label("Health")
        workers = health.locator("li", has_text="Workers")
        expect(workers.locator(".staff-pill")).to_have_class(re.compile("danger"))
        oldest = health.locator("li", has_text="Oldest queued run")
        expect(oldest).to_contain_text(re.compile("waits [56] min"))
        expect(oldest.locator("a").first).to_have_attribute("href", re.compile(run["id"]))
        for part, section in ((oldest, "runsnottaken"), (workers, "norunworkers")):
            part.get_by_role("link", name=re.compile("What to do")).click()
            expect(page).to_have_url(re.compile(rf"/docs/operations/?#{section}$"), timeout=SECONDS)
            page.go_back()
        page.context.close()
