"""What mkdocs does with the Markdown of this repository: the files beside docs are pages too, a link to a file that is
no page becomes text, and a diagram is shown as its picture.
"""

import hashlib
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent
BESIDE = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "reporting.md"}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s:#]+)(#[^)\s]*)?\)")
ITEM = re.compile(r"^- \[(.+?)\]\((.+?)\)|^## (.+)", re.MULTILINE)
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^\s*accTitle: (.+)$", re.MULTILINE)


def picture(source: str, scheme: str) -> str:
    """The file of a diagram's picture, below docs. ``tests/documentation/diagrams.py`` draws it."""
    return f"images/diagram-{hashlib.sha256(source.encode()).hexdigest()[:12]}-{scheme}.svg"


def page_of(target: str) -> str | None:
    """The page or file, below docs, of a path of the repository."""
    if target.startswith("docs/") and (ROOT / target).is_dir():
        target += "/README.md"
    below = target.removeprefix("docs/") if (ROOT / target).is_file() and target.startswith("docs/") else None
    return BESIDE.get(target, below)


def on_config(config: Any) -> Any:
    """The navigation is the list of docs/README.md; a folder without a README stands for its files."""
    config.nav = [{"Documentation": ["README.md"]}]
    for title, link, group in ITEM.findall((ROOT / "docs" / "README.md").read_text()):
        if group:
            config.nav.append({group: []})
        else:
            files = sorted(f"{link}{file.name}" for file in (ROOT / "docs" / link).glob("*.md"))
            next(iter(config.nav[-1].values())).append({title: page_of(normpath(f"docs/{link}")) or files})
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    origin = next((name for name, beside in BESIDE.items() if beside == source), f"docs/{source}")

    def link(match: re.Match[str]) -> str:
        target = normpath(join(dirname(origin), match[2]))
        if found := page_of(target):
            return f"{match[1]}({relpath(found, dirname(source))}{match[3] or ''})"
        # mkdocs refuses what leads to nothing.
        return match[1][1:-1] if (ROOT / target).exists() else match[0]

    def diagram(match: re.Match[str]) -> str:
        title, above = TITLE.search(match[1]), relpath(".", dirname(source))
        shown = [(f"{above}/{picture(match[1], scheme)}", scheme) for scheme in ("light", "dark")]
        return "\n".join(f"![{title[1] if title else ''}]({path}#only-{scheme})" for path, scheme in shown)

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for number, part in enumerate(parts):
        # The marks after a fence's language say how a sample is tested.
        fence = re.sub(r"\A```(\w+)[^\n]*", r"```\1", part)
        parts[number] = DIAGRAM.sub(diagram, fence) if number % 2 else LINK.sub(link, part)
    return "".join(parts)
