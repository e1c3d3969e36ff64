"""Every relative link of every Markdown file leads to a file of the repository, and to a heading of it."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.stack.process import ROOT

LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
).stdout.splitlines()
# Without git, as in an archive of the repository.
PAGES = [ROOT / name for name in LISTED] or [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def slugs(titles: Iterable[str]) -> Iterator[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    for title in titles:
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        seen[slug] += 1
        yield f"{slug}-{seen[slug] - 1}" if seen[slug] > 1 else slug


def parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table")


def links(page: Path) -> list[str]:
    nested = [child for token in parser().parse(page.read_text()) for child in token.children or ()]
    return [
        str(token.attrGet("href") or token.attrGet("src")) for token in nested if token.type in ("link_open", "image")
    ]


@cache
def anchors(page: Path) -> set[str]:
    tokens = parser().parse(page.read_text())
    titles = [after for token, after in pairwise(tokens) if token.type == "heading_open"]
    return set(slugs("".join(child.content for child in title.children or ()) for title in titles))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_has_a_target(page: Path) -> None:
    wrong = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "mailto"):
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (parts.fragment and (target.suffix != ".md" or parts.fragment not in anchors(target))):
            wrong.append(link)
    assert wrong == []


def test_links_and_images_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n\n| [x](a.md#b) |\n|---|\n| ![y](c.png) |\n\n# A b c\n\n`[z](d.md)`\n")
    assert links(page) == ["a.md#b", "c.png"]
    assert anchors(page) == {"a-b-c", "a-b-c-1"}
