"""The admin in a real browser: sign in, open pages, find a run, read its timeline, cancel it, grant credits."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.stack.browser import browsing
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services]

PASSWORD = "correct horse battery"
MAKE_STAFF = f"""
from django.contrib.auth.models import Group, User
olga = User.objects.create_user("olga", "olga@example.com", "{PASSWORD}", is_staff=True)
olga.groups.set(Group.objects.filter(name__in=["support", "billing"]))
User.objects.create_superuser("root", "root@example.com", "{PASSWORD}")
"""


@pytest.fixture(scope="module")
def staffed(stack: Stack) -> Stack:
    stack.manage("shell", "-c", MAKE_STAFF)
    return stack


@pytest.fixture
def page(browser: Browser, staffed: Stack) -> Iterator[Page]:
    # Navigation to another page aborts the unfinished requests of the previous page.
    with browsing(browser, staffed.url, "/admin/", viewport={"width": 1440, "height": 900}) as page:
        yield page


def sign_in(page: Page, name: str = "olga") -> None:
    page.fill("#id_username", name)
    page.fill("#id_password", PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("Oldest queued run").first).to_be_visible()


def test_staff_find_read_and_cancel_a_run(staffed, page):
    ada = staffed.session("ada")
    ada.post("/webhooks", {"url": "http://127.0.0.1:9/nobody"})
    chat = ada.post("/chats").json()["id"]
    ask = '/call calculate {"expression": "6*7"}\n/ask Which?'
    run = ada.post(f"/chats/{chat}/runs", {"message": ask}).json()["id"]
    staffed.wait_for(lambda: ada.get(f"/runs/{run}").json()["status"] == "waiting")
    sign_in(page)
    assert page.locator("canvas.chart").count() >= 1
    page.locator('a[href="/admin/runs/run/"]').first.click()
    page.fill("#searchbar", "ada")
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
    assert ada.get(f"/runs/{run}").json()["status"] == "cancelled"
    page.locator('a[href$="/history/"]').click()
    expect(page.get_by_text("Cancelled.")).to_be_visible()


def test_runs_are_cancelled_from_the_list(staffed, page):
    eve = staffed.session("eve")
    runs = []
    for _ in range(2):
        chat = eve.post("/chats").json()["id"]
        runs.append(eve.post(f"/chats/{chat}/runs", {"message": "/ask Which?"}).json()["id"])
    staffed.wait_for(lambda: all(eve.get(f"/runs/{run}").json()["status"] == "waiting" for run in runs))
    sign_in(page)
    page.goto(f"{staffed.url}/admin/runs/run/?q=eve")
    page.locator("input.action-select").nth(0).check()
    page.locator("input.action-select").nth(1).check()
    page.locator("select[name=action]").select_option("cancel")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Yes, cancel").click()
    expect(page.get_by_text("2 done: Cancel.")).to_be_visible()
    assert {eve.get(f"/runs/{run}").json()["status"] for run in runs} == {"cancelled"}


def test_staff_grant_credits_and_an_invalid_amount_is_rejected(staffed, page):
    bob = staffed.session("bob")
    before = bob.get("/me/credits").json()["available"]
    sign_in(page)
    page.goto(f"{staffed.url}/admin/credits/account/")
    page.get_by_role("link", name="Grant credits").click()
    page.fill("[name=user]", "bob")
    page.fill("[name=amount]", "-5")
    page.fill("[name=reason]", "Sorry for Monday")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("must be at least")).to_be_visible()
    page.fill("[name=amount]", "12.5")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("The credits can be spent at once.")).to_be_visible()
    assert bob.get("/me/credits").json()["available"] == before
    page.get_by_role("button", name="Yes, grant credits").click()
    expect(page.get_by_text("Granted 12.5: Sorry for Monday")).to_be_visible()
    assert float(bob.get("/me/credits").json()["available"]) == float(before) + 12.5


def test_every_kind_of_page_works_under_its_content_security_policy(staffed, page):
    """The browser logs an error for anything that the policy blocks. The ``page`` fixture fails on such errors."""
    ada = staffed.session("ada")
    ada.post(f"/chats/{ada.post('/chats').json()['id']}/runs", {"message": "Hello"})
    sign_in(page, "root")
    for path in ("/api/docs", "/admin/runs/run/", "/admin/runs/tool/add/"):
        answer = page.goto(staffed.url + path)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert "unsafe-inline" not in policy["script-src"]
        assert (policy["object-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
        shown = ".opblock" if path == "/api/docs" else "#content-main input:visible"
        expect(page.locator(shown).first).to_be_visible()
    page.goto(f"{staffed.url}/admin/auth/user/?q=olga")
    page.get_by_role("link", name="olga", exact=True).click()
    page.get_by_role("link", name="Sign-in and roles").click()
    # Django's calendar, which a script creates.
    page.locator(".datetimeshortcuts a:has(.date-icon)").first.click()
    expect(page.locator(".calendarbox").first).to_be_visible()
    # The theme and the charts, which need Alpine and Chart.js.
    page.goto(f"{staffed.url}/admin/")
    page.locator("a", has_text="Dark").evaluate("link => link.click()")
    expect(page.locator("html")).to_have_class(re.compile(r"\bdark\b"))
    drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"
    assert page.locator("canvas.chart").first.evaluate(drawn)
