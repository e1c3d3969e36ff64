"""axe-core finds nothing serious on any page of the admin: light, at the width of a desk and of a phone, and in the
colours of the dark theme. Each page has one landmark ``main``, and none is wider than its screen.
"""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.driver import Driver
from tests.stack.accessibility import PHONE, problems, serious_problems
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services]

PASSWORD = "correct horse battery"
# The rule that depends on the width, on every page. The parts that only a phone shows are the same on all pages.
OF_WIDTH = "scrollable-region-focusable"
# A row of every list, and two superusers.
PREPARE = f"""
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from apikeys import keys
from credits import ledger
from runs.catalogue import agents
from runs.models import Run, Tool
from tests import factories
User.objects.create_superuser("root", "root@example.com", "{PASSWORD}")
first = User(username="first", is_staff=True, is_superuser=True)
first.set_unusable_password()
first.save()
ada = User.objects.get(username="ada")
factories.AttachmentFactory(user=ada)
LogEntry.objects.create(user=first, content_type=ContentType.objects.get_for_model(User), object_id=str(ada.pk),
    object_repr="ada", action_flag=CHANGE, change_message="Changed.")
failed = Run.objects.get(status="failed")
endpoint = factories.EndpointFactory(user=ada, enabled=False)
for status in ("DELIVERED", "DEAD"):
    factories.AttemptFactory(delivery=factories.DeliveryFactory(
        endpoint=endpoint, run_id=failed.pk, chat_id=failed.chat_id, status=status, attempt_count=2))
keys.create_key(ada, name="ci")
keys.create_server_key("backend")
for text in ("Help.", "Help well."):
    agents.save("support", display_name="Support", instructions=text)
long = User.objects.create(username="auth0|" + "W" * 144)
factories.RunFactory(chat=factories.ChatFactory(user=long), agent_name="a" * 64, resolved_model="m" * 100)
ledger.grant(long.pk, 999_999_999_123_456, cause="long", reason="r" * 500)
Tool.objects.create(name="weather", description="Weather.", node_type="http", price=1, url="https://example.com/",
    provider_cost_percent=40)
"""
# The address of each list and of the newest row in it.
ADDRESSES = """
from django.apps import apps
from django.conf import settings
from django.urls import reverse
for entries in settings.STAFF_NAVIGATION.values():
    for _, _, label in entries:
        model, name = apps.get_model(label), label.replace(".", "_").lower()
        print("page", reverse(f"admin:{name}_changelist"))
        row = model._default_manager.order_by("pk").last()
        print("page", reverse(f"admin:{name}_change", args=[row.pk]) if row else f"/no-row-of/{label}")
"""
ROWS = """
from django.contrib.auth.models import User
from apikeys.models import ApiKey
from credits.models import LedgerEntry
from runs.models import Agent, AgentModel, Provider, Tool
print("long", long.pk)
print("row", User.objects.get(username="ada").pk, ApiKey.objects.get().pk, Agent.objects.get().pk,
    AgentModel.objects.get(name="demo").pk, Tool.objects.get(name="weather").pk,
    LedgerEntry.objects.filter(type="CAPTURE").first().pk, Provider.objects.get(name="openai").pk, endpoint.pk)
"""
LOCK = """
from axes.models import AccessAttempt
AccessAttempt.objects.create(username="x", ip_address="127.0.0.1", user_agent="x", failures_since_start=99)
"""


@pytest.fixture(scope="module")
def pages(stack: Stack) -> dict[str, Any]:
    """The addresses of every kind of page."""
    ada = Driver(stack.session("ada"))
    run = ada.ask('/call draw_chart {"title": "T", "series": [3, 1]}\n/say done')
    ada.respond(run, kind="CREDIT_APPROVAL", approved=True)
    ada.wait(run["id"])
    failed = ada.finish("/fail out of order")["id"]
    printed = stack.manage("shell", "-v0", "-c", PREPARE + ADDRESSES + ROWS)
    found = re.findall("^page (.*)$", printed, re.M)
    rows, long = re.search("^row (.*)$", printed, re.M), re.search("^long (.*)$", printed, re.M)
    assert rows
    assert long
    user, key, agent, model, tool, charge, provider, endpoint = rows[1].split()
    reports = [f"/admin/reports/?by={name}" for name in ("user", "tool", "model", "agent")]
    return {
        "grant": f"/admin/credits/account/{user}/do/grant/",
        "addresses": [
            "/admin/", *found, *reports, f"/admin/people/{user}/", f"/admin/auth/user/{user}/do/block/",
            f"/admin/people/{long[1]}/",
            f"/admin/auth/user/{user}/do/erase/", f"/admin/auth/user/{user}/do/export/",
            "/admin/webhooks/endpoint/do/installation/", "/admin/apikeys/serverkey/do/create/",
            f"/admin/runs/agent/{agent}/change/", f"/admin/runs/provider/{provider}/test/",
            f"/admin/webhooks/endpoint/{endpoint}/change/", f"/admin/runs/run/{run['id']}/change/",
            f"/admin/runs/run/{run['id']}/content/", f"/admin/runs/run/{failed}/change/",
            f"/admin/apikeys/apikey/{key}/do/revoke/", f"/admin/apikeys/apikey/{key}/do/narrow/",
            f"/admin/credits/account/{user}/do/adjust/", f"/admin/credits/ledgerentry/{charge}/do/refund/",
            f"/admin/credits/ledgerentry/{charge}/change/", "/admin/credits/account/do/grant_to/",
            f"/admin/runs/agent/{agent}/versions/", f"/admin/runs/agentmodel/{model}/test/", "/admin/runs/tool/import/",
            f"/admin/runs/tool/{tool}/try/", f"/admin/runs/tool/{tool}/history/", f"/admin/runs/tool/{tool}/delete/",
            f"/admin/runs/tool/{tool}/change/", "/admin/runs/tool/add/", "/admin/runs/agentmodel/add/",
            "/admin/runs/agent/add/", "/admin/runs/provider/add/", "/admin/auth/group/add/", "/admin/auth/user/add/",
            f"/admin/auth/user/{user}/password/", "/admin/password_change/", "/admin/find/?q=nobody",
            "/admin/runs/run/?q=nobody", "/admin/credits/ledgerentry/?holds=all", "/admin/nothing/",
        ],
    }  # fmt: skip


def checked(page: Page) -> list[str]:
    found = [] if page.locator("main").count() == 1 else ["not one main"]
    return found + problems(page, OF_WIDTH, dark="dark")


def sign_in(page: Page, name: str, password: str) -> None:
    page.fill("#id_username", name)
    page.fill("#id_password", password)
    page.get_by_role("button", name="Log in").click()


def opened(browser: Browser, stack: Stack) -> Page:
    page = browser.new_context(bypass_csp=True).new_page()
    page.goto(f"{stack.url}/admin/login/?next=/admin/")
    return page


@pytest.mark.timeout(600)
def test_every_page_is_accessible(browser: Browser, stack: Stack, pages: dict[str, Any]) -> None:
    found: dict[str, list[str]] = {}
    page = opened(browser, stack)
    sign_in(page, "root", PASSWORD)
    expect(page.get_by_label("Health")).to_be_visible()
    page.set_viewport_size(PHONE)
    found["the parts of every page, on a phone"] = serious_problems(page)
    for address in pages["addresses"]:
        answer = page.goto(stack.url + address)
        assert answer is not None
        assert answer.status == (404 if "nothing" in address else 200), address
        found[address] = checked(page)
    page.context.close()
    assert {address: wrong for address, wrong in found.items() if wrong} == {}


def test_signing_in_and_confirming_are_accessible(browser: Browser, stack: Stack, pages: dict[str, Any]) -> None:
    found: dict[str, list[str]] = {}
    page = opened(browser, stack)
    page.emulate_media(color_scheme="dark")
    page.reload()
    expect(page.locator("html")).to_have_class(re.compile(r"\bdark\b"))
    page.emulate_media(color_scheme="light")
    page.reload()
    found["signing in"] = checked(page)
    sign_in(page, "root", PASSWORD)
    expect(page.get_by_label("Health")).to_be_visible()
    page.goto(stack.url + pages["grant"])
    page.fill("[name=amount]", "1")
    page.fill("[name=reason]", "x")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("button", name=re.compile("^Yes"))).to_be_visible()
    found["confirmation"] = checked(page)
    page.context.close()
    stack.manage("shell", "-v0", "-c", LOCK)
    try:
        page = opened(browser, stack)
        sign_in(page, "root", PASSWORD)
        expect(page.get_by_role("heading", name="Too many attempts")).to_be_visible()
        found["locked"] = checked(page)
    finally:
        stack.manage("axes_reset")
    page.context.close()
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
