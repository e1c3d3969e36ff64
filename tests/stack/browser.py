"""A headless Chromium that opens a page of the service and records the errors of the page."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

# The headless shell draws no window and needs half of the CPU time of the others.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Chromium also says this of a stream that the page has read to its end.
ABORTED = "net::ERR_ABORTED"
# How long a page may take to show what a test expects, in milliseconds: other tests compute at the same time.
EXPECT_MS = 40_000


@contextmanager
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert path, "Chromium is not installed (Debian: apt-get install chromium)"
    expect.set_options(timeout=EXPECT_MS)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=FLAGS) as browser:
        yield browser


@contextmanager
def browsing(browser: Browser, server: str, path: str, *, viewport: Any, tolerated: str = ABORTED) -> Iterator[Page]:
    """Open the page, in a profile of its own, and watch it."""
    with browser.new_page(viewport=viewport) as page, watching(page, server, tolerated):
        page.goto(f"{server}{path}")
        yield page


@contextmanager
def watching(page: Page, server: str, tolerated: str = ABORTED) -> Iterator[None]:
    """At the end there must be no error, no violation of the Content-Security-Policy and no request to another host.
    Messages of Chromium that contain ``tolerated`` are ignored, and requests that the page aborts.
    """
    wrong: list[str] = []
    ours = (server, "data:", "blob:")
    listeners: dict[Any, Callable[[Any], Any]] = {
        "pageerror": lambda error: wrong.append(str(error)),
        "console": lambda said: said.type == "error" and wrong.append(said.text),
        "requestfailed": lambda asked: wrong.append(f"{asked.failure} {asked.url}"),
        "request": lambda asked: wrong.append(asked.url) if not asked.url.startswith(ours) else None,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    yield
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert [what for what in wrong if tolerated not in what and ABORTED not in what] == []
