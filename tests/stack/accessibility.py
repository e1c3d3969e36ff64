"""What axe-core finds on a page."""

from __future__ import annotations

from playwright.sync_api import Page

from tests.node import modules

# Not as an element of the page, which its Content-Security-Policy would refuse.
CHECK = "async (options) => (await axe.run({resultTypes: ['violations'], ...options})).violations"


def serious_problems(page: Page, *rules: str) -> list[str]:
    """The serious and critical violations of the rules (default: all), each with the elements that it is about."""
    page.evaluate((modules() / "axe-core" / "axe.min.js").read_text())
    return [
        f"{found['id']}: {found['help']} {[node['target'] for node in found['nodes']]}"
        for found in page.evaluate(CHECK, {"runOnly": list(rules)} if rules else {})
        if found["impact"] in ("serious", "critical")
    ]
