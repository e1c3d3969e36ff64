"""The front page and the reference of the API in a real browser: wide, narrow, light, dark, with the keyboard."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.stack.accessibility import serious_problems
from tests.stack.browser import browsing
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

NARROW, WIDE = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
PAGES = ("/",)

SURFACES = {
    "Session surface: /api/v1, session tokens": "#operations-chats-sessionChatsList",
    "Public surface: /api/public/v1, API keys": "#operations-chats-publicChatsList",
}


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    # Navigation to another page aborts the unfinished requests of the previous page.
    with browsing(browser, stack.url, "/", viewport=WIDE) as page:
        yield page


def test_no_page_is_wider_than_a_phone(stack: Stack, page: Page) -> None:
    page.set_viewport_size(NARROW)
    for path in PAGES:
        page.goto(stack.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], path
    page.goto(f"{stack.url}/api/docs")
    operation = page.locator("#operations-chats-sessionChatsList")
    operation.locator("button").first.click()
    expect(operation.locator(".response").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "light"), (WIDE, "dark")])
def test_axe_finds_nothing_serious(stack: Stack, page: Page, viewport: dict[str, int], scheme: str) -> None:
    page.set_viewport_size(viewport)  # type: ignore[arg-type]
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    found = {}
    for path in PAGES:
        page.goto(stack.url + path)
        found[path] = serious_problems(page)
    page.goto(f"{stack.url}/api/docs")
    for surface, operation in SURFACES.items():
        page.locator("#select").select_option(label=surface)
        shown = page.locator(operation)
        expect(shown).to_be_visible()
        found[surface] = serious_problems(page)
        shown.locator("button").first.click()
        expect(shown.locator(".opblock-body")).to_be_visible()
        found[f"{surface}, an operation"] = serious_problems(page)
    assert {where: problems for where, problems in found.items() if problems} == {}


def test_the_front_page_follows_the_system_s_dark_mode(page: Page) -> None:
    backgrounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(15, 17, 21)"]


def test_the_api_reference_shows_each_surface(stack: Stack, page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(f"{stack.url}/api/docs")
    expect(page.locator("html")).to_have_attribute("class", "dark-mode")
    expect(page.locator("#operations-chats-sessionChatsList")).to_be_visible()
    expect(page.get_by_label("servers")).to_be_visible()
    page.locator("#select").select_option(label="Public surface: /api/public/v1, API keys")
    expect(page.locator("#operations-chats-publicChatsList")).to_be_visible()
    expect(page.locator("#operations-chats-sessionChatsList")).to_have_count(0)
