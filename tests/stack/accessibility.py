"""What axe-core finds on a page, at the width of a desk and of a phone and in the dark."""

from typing import Any

from playwright.sync_api import Page

from tests.node import modules

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# The rules that look at colours. In the dark, the elements and their places are the same.
OF_COLOURS = ("color-contrast", "link-in-text-block")
# A chart takes its new width some frames after the screen.
SIDEWAYS = """async () => {
  const more = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
  for (let frame = 0; more() && frame < 60; frame++) await new Promise(requestAnimationFrame);
  return more();
}"""
# A colour that changes slowly would be looked at before it has changed.
TURN = """([name, dark]) => {
  if (name) document.documentElement.classList.toggle(name, dark);
  for (const one of document.getAnimations()) if (one instanceof CSSTransition) one.finish();
}"""
CHECK = "async (options) => (await axe.run({resultTypes: ['violations'], ...options})).violations"


def serious_problems(page: Page, *rules: str) -> list[str]:
    """The serious and critical violations of the rules (default: all), each with the elements that it is about."""
    # Once in a document: it takes as long as a check. An element would be refused by the Content-Security-Policy.
    if not page.evaluate("'axe' in window"):
        page.evaluate((modules() / "axe-core" / "axe.min.js").read_text())
    options = {"runOnly": list(rules)} if rules else {}
    return [
        f"{found['id']}: {found['help']} {[node['target'] for node in found['nodes']]}"
        for found in page.evaluate(CHECK, options)
        if found["impact"] in ("serious", "critical")
    ]


def wider(page: Page, size: Any) -> list[str]:
    """Says so if the open page is wider than a screen of the size."""
    page.set_viewport_size(size)
    more = page.evaluate(SIDEWAYS)
    return [f"{more} pixels wider than a screen of {size['width']}"] if more else []


def turn(page: Page, scheme: str, dark: str = "") -> None:
    """Show the open page light or dark. A page that has a class ``dark`` looks at the media once, when it opens."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.evaluate(TURN, [dark, scheme == "dark"])


def problems(page: Page, *of_width: str, dark: str = "") -> list[str]:
    """What is wrong with the open page at each width, and in the dark. On a phone, only the rules ``of_width`` are
    checked, if there are any.
    """
    found = []
    for name, size, rules in (("desk", DESK, ()), ("phone", PHONE, of_width)):
        found += wider(page, size)
        found += [f"{name}: {wrong}" for wrong in serious_problems(page, *rules)]
    turn(page, "dark", dark)
    found += [f"dark: {wrong}" for wrong in serious_problems(page, *OF_COLOURS)]
    turn(page, "light", dark)
    return found
