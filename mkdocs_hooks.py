"""What mkdocs does with the Markdown of this repository: the files beside docs are pages too, a link to a file that is
no page becomes text, and a diagram is shown as its picture.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent
BESIDE = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "reporting.md"}
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
ITEM = re.compile(r"^- \[(?P<title>.+?)\]\((?P<link>.+?)\)|^## (?P<group>.+)", re.MULTILINE)
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^\s*accTitle: (.+)$", re.MULTILINE)


def picture(source: str, scheme: str) -> str:
    """The file of a diagram's picture, below docs. ``tests/documentation/diagrams.py`` draws it."""
    return f"images/diagram-{hashlib.sha256(source.encode()).hexdigest()[:12]}-{scheme}.svg"


def page_of(target: str) -> str | None:
    """The page or file, below docs, of a path of the repository."""
    if target in BESIDE:
        return BESIDE[target]
    if target.startswith("docs/") and (ROOT / target).is_dir():
        target += "/README.md"
    return target.removeprefix("docs/") if target.startswith("docs/") and (ROOT / target).is_file() else None


def on_config(config: Any) -> Any:
    """The navigation is the list of docs/README.md."""
    nav: list[dict[str, list[Any]]] = [{"Documentation": ["README.md"]}]
    for item in ITEM.finditer((ROOT / "docs" / "README.md").read_text()):
        if item["group"]:
            nav.append({item["group"]: []})
            continue
        folder = ROOT / "docs" / item["link"]
        page: Any = page_of(posixpath.normpath(f"docs/{item['link']}"))
        if page is None:
            page = sorted(f"{item['link']}{file.name}" for file in folder.glob("*.md"))
        next(iter(nav[-1].values())).append({item["title"]: page})
    config.nav = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    origin = next((name for name, beside in BESIDE.items() if beside == source), f"docs/{source}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["path"]))
        found = page_of(target)
        if found is None:
            # mkdocs refuses what leads to nothing.
            return match["text"][1:-1] if (ROOT / target).exists() else match[0]
        return f"{match['text']}({posixpath.relpath(found, posixpath.dirname(source))}{match['anchor'] or ''})"

    def diagram(match: re.Match[str]) -> str:
        title = TITLE.search(match[1])
        above = posixpath.relpath(".", posixpath.dirname(source))
        names = ((picture(match[1], scheme), scheme) for scheme in ("light", "dark"))
        return "\n".join(f"![{title[1] if title else ''}]({above}/{name}#only-{scheme})" for name, scheme in names)

    def fence(source: str) -> str:
        """Without the marks after the language, which say how a sample is tested."""
        return DIAGRAM.sub(diagram, re.sub(r"\A```(\w+)[^\n]*", r"```\1", source))

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(fence(part) if part.startswith("```") else LINK.sub(link, part) for part in parts)
