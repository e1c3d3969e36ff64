"""The front page and the reference of the API in a real browser: wide, narrow, light, dark, with the keyboard."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.stack.accessibility import DESK, problems, turn
from tests.stack.browser import browsing
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

SESSION, PUBLIC = "#operations-chats-sessionChatsList", "#operations-chats-publicChatsList"
SURFACES = {
    "Session surface: /api/v1, session tokens": (SESSION, PUBLIC),
    "Public surface: /api/public/v1, API keys": (PUBLIC, SESSION),
}


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    # Navigation to another page aborts the unfinished requests of the previous page.
    with browsing(browser, stack.url, "/", viewport=DESK) as page:
        yield page


def test_the_front_page_is_accessible_and_follows_the_system_s_dark_mode(page: Page) -> None:
    assert problems(page) == []
    backgrounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(15, 17, 21)"]


@pytest.mark.timeout(240)
def test_the_api_reference_is_accessible_and_shows_each_surface(stack: Stack, page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(f"{stack.url}/api/docs")
    expect(page.locator("html")).to_have_attribute("class", "dark-mode")
    expect(page.locator(SESSION)).to_be_visible()
    expect(page.get_by_label("servers")).to_be_visible()
    turn(page, "light", "dark-mode")
    for surface, (shown, other) in SURFACES.items():
        page.locator("#select").select_option(label=surface)
        expect(page.locator(shown)).to_be_visible()
        expect(page.locator(other)).to_have_count(0)
    # The same script shows both documents: one with an open operation has all that the other has.
    page.locator(shown).locator("button").first.click()
    expect(page.locator(shown).locator(".response").first).to_be_visible()
    assert problems(page, dark="dark-mode") == []
