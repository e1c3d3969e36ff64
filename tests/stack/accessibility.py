"""What axe-core finds on a page."""

from playwright.sync_api import Page

from tests.node import modules

# Not as an element of the page, which its Content-Security-Policy would refuse.
CHECK = "async (options) => (await axe.run({resultTypes: ['violations'], ...options})).violations"


def serious_problems(page: Page, *rules: str) -> list[str]:
    """The serious and critical violations of the rules (default: all), each with the elements that it is about."""
    # Once in a document: it takes as long as a check.
    if not page.evaluate("'axe' in window"):
        page.evaluate((modules() / "axe-core" / "axe.min.js").read_text())
    options = {"runOnly": list(rules)} if rules else {}
    return [
        f"{found['id']}: {found['help']} {[node['target'] for node in found['nodes']]}"
        for found in page.evaluate(CHECK, options)
        if found["impact"] in ("serious", "critical")
    ]
