"""Tests of the playground in a real browser: a live run, a tool call, an approval and an answer."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.playground import NARROW, WIDE, say, sign_in
from tests.stack.browser import browsing
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.services]


@pytest.fixture(params=[WIDE, NARROW], ids=["wide", "narrow"])
def page(browser: Browser, streams: StreamStack, request) -> Iterator[Page]:
    # One test stops the server for a while.
    with browsing(browser, streams.url, "/playground", viewport=request.param, tolerated="net::ERR_") as page:
        yield page
        assert page.locator("body").bounding_box()["width"] == request.param["width"]


@pytest.mark.parametrize("surface", ["session", "public"])
def test_a_run_is_shown_and_answered(streams, page, surface):
    sign_in(page, streams.token("ada") if surface == "session" else streams.api_key("ada"))
    page.get_by_text("Ask for approval").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    status = page.locator(".state .pill")
    expect(status.last).to_have_text("Completed")
    expect(page.locator(".tool b")).to_have_text("draw_chart")
    picture = page.locator(".tool img")
    expect(picture).to_be_visible()
    expect(page.locator(".text").last).to_have_text("Here it is.")
    say(page, "/ask Which?\n/say {result} it is")
    page.get_by_label("Your answer").fill("blue")
    page.get_by_label("Messages").get_by_role("button", name="Answer").click()
    expect(page.locator(".text").last).to_have_text("blue it is")
    say(page, "/stream 500 50")
    expect(page.locator(".text.live")).to_contain_text("fox")
    page.get_by_role("button", name="Stop").click()
    expect(status.last).to_have_text("Cancelled")
    # The tab keeps the token after a reload and drops it after sign-out.
    page.reload()
    expect(page.locator("#credits")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#sign-in")).to_be_visible()
    page.reload()
    expect(page.locator("#sign-in")).to_be_visible()


def test_untrusted_text_is_not_rendered_as_markup(streams, page):
    sign_in(page, streams.token("ada"))
    say(page, "/say <img src=x onerror=alert(1)><b>bold</b>")
    expect(page.locator(".text").last).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")


def test_page_continues_after_a_restart_of_the_server(streams, page):
    sign_in(page, streams.token("ada"))
    say(page, "/stream 200 50")
    expect(page.locator(".text.live")).to_contain_text("fox")
    streams.restart("web")
    expect(page.locator(".state .pill").last).to_have_text("Completed", timeout=30_000)
    words = page.locator(".text").last.inner_text().split()
    assert len(words) == 200
