"""What tests do in the playground."""

from playwright.sync_api import Page, expect

WIDE, NARROW = {"width": 1280, "height": 820}, {"width": 390, "height": 780}


def sign_in(page: Page, credential: str) -> None:
    page.fill("#credential", credential)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#credits")).to_be_visible()


def say(page: Page, message: str) -> None:
    expect(page.locator("#send")).to_be_visible()
    page.fill("#message", message)
    page.locator("#send").click()


def wait_for(page: Page, status: str) -> None:
    """The newest run of the page has this status."""
    expect(page.locator(".state .pill").last).to_have_text(status.capitalize())


def said(page: Page, message: str, status: str = "completed") -> None:
    """A new run with this message reaches the status."""
    runs = page.locator(".state .pill")
    before = runs.count()
    say(page, message)
    expect(runs).to_have_count(before + 1)
    wait_for(page, status)


def open_tab(page: Page, name: str) -> None:
    tab = page.get_by_role("tab", name=name)
    if not tab.is_visible():
        page.get_by_role("button", name="Details", exact=True).first.click()
    tab.click()
