"""Markdown to HTML: GitHub's anchors of headings, links of files as links of pages, diagrams with their description."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from html import escape
from typing import Any
from urllib.parse import urlsplit

# A relative link or image → its address, or None if there is nothing to link to.
Resolve = Callable[[str], str | None]
TITLE = re.compile(r"^\s*accTitle: (.+)$", re.MULTILINE)
DESCRIPTION = re.compile(r"^\s*accDescr: (.+)$", re.MULTILINE)


class Anchors:
    """The anchors of one page's headings, as GitHub makes them."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def add(self, title: str) -> str:
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        self.seen[slug] += 1
        return f"{slug}-{self.seen[slug] - 1}" if self.seen[slug] > 1 else slug


def plain(text: str) -> str:
    """A line of Markdown without its marks."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`|]|\*\*|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)|-{3,}", "", text).strip()


def parser() -> Any:
    """CommonMark and tables. HTML is shown as text."""
    # Most web processes never show a page of the documentation.
    from markdown_it import MarkdownIt

    found = MarkdownIt("commonmark", {"html": False}).enable("table")
    found.add_render_rule("table_open", lambda *_: '<div class="table" tabindex="0"><table>\n')
    found.add_render_rule("table_close", lambda *_: "</table></div>\n")
    found.add_render_rule("fence", _fence)
    return found


def _fence(_: Any, tokens: list[Any], at: int, *rest: Any) -> str:
    language, source = tokens[at].info.partition(" ")[0], tokens[at].content
    code = f'<pre tabindex="0"><code class="language-{escape(language)}">{escape(source)}</code></pre>\n'
    if language != "mermaid":
        return code
    titled, described = TITLE.search(source), DESCRIPTION.search(source)
    about = f"<figcaption>{escape(described[1])}</figcaption>" if described else ""
    light, dark = (f"/docs/{picture(source, scheme)}" for scheme in ("light", "dark"))
    image = f'<img src="{light}" alt="{escape(titled[1]) if titled else "Diagram"}">'
    shown = f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">{image}</picture>'
    return (
        f'<figure>{about}<div class="diagram" tabindex="0">{shown}</div>'
        f"<details><summary>Source of the diagram (Mermaid)</summary>{code}</details></figure>\n"
    )


def picture(source: str, scheme: str) -> str:
    """The file of a diagram's picture, below docs. ``tests/documentation/diagrams.py`` draws it."""
    return f"images/diagram-{hashlib.sha256(source.encode()).hexdigest()[:12]}-{scheme}.svg"


def render(text: str, resolve: Resolve) -> tuple[str, list[tuple[int, str, str]]]:
    """The HTML of a page, and the (level, anchor, title) of its headings."""
    markdown = parser()
    tokens, anchors, headings = markdown.parse(text), Anchors(), []
    for at, token in enumerate(tokens):
        # The policy of the pages allows no style in attributes.
        token.attrs.pop("style", None)
        if token.type == "heading_open":
            title = "".join(child.content for child in tokens[at + 1].children or ())
            token.attrs["id"] = anchors.add(title)
            headings.append((int(token.tag[1]), str(token.attrs["id"]), title))
        for child in _nested(token):
            _redirect(child, resolve)
    return markdown.renderer.render(tokens, markdown.options, {}), headings


def _nested(token: Any) -> Iterator[Any]:
    yield from token.children or ()


def _redirect(token: Any, resolve: Resolve) -> None:
    name = {"link_open": "href", "image": "src"}.get(token.type)
    if name is None or urlsplit(link := str(token.attrs[name])).scheme or link.startswith(("#", "/")):
        return
    if found := resolve(link):
        token.attrs[name] = found
    else:
        # A link without an address is a placeholder.
        del token.attrs[name]
