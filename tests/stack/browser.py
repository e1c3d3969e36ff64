"""A headless Chromium that looks at a page of the service, and remembers whatever went wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, sync_playwright

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def browsing(server: str, path: str, *, viewport: Any, tolerated: str) -> Iterator[Page]:
    """The page, opened. Once it is left nothing may have failed but what is ``tolerated``, a part of Chromium's own
    words: no error, nothing that a Content-Security-Policy refused, and no request to anywhere else.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, "Chromium is not installed (Debian: apt-get install chromium)"
    wrong: list[str] = []
    ours = (server, "data:", "blob:")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=browser, args=FLAGS) as chromium,
    ):
        page = chromium.new_page(viewport=viewport)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        page.on("requestfailed", lambda asked: wrong.append(f"{asked.failure} {asked.url}"))
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(ours) else None)
        page.goto(f"{server}{path}")
        yield page
    assert [what for what in wrong if tolerated not in what] == []
