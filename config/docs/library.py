"""Which pages there are: their files, addresses, groups, sections and search. docs/README.md is the list of pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from django.conf import settings

from config.docs.markdown import Anchors, plain

ROOT = Path(settings.BASE_DIR)
FOLDER = ROOT / "docs"
# Pages beside the folder docs, by the name in their address.
BESIDE = {"readme": ROOT / "README.md", "changelog": ROOT / "CHANGELOG.md", "reporting": ROOT / "SECURITY.md"}
# Other files of the folder docs, which pages show or link to. What is not listed is sent as plain text.
TYPES = {".md": "text/markdown", ".png": "image/png", ".svg": "image/svg+xml", ".json": "application/json"}
ITEM = re.compile(r"^- \[(?P<title>.+?)\]\((?P<link>.+?)\): (?P<about>.+(?:\n {2}.+)*)|^## (?P<group>.+)", re.MULTILINE)
HEADING = re.compile(r"(#{1,6}) (.+)")
WORDS_MAX, RESULTS_MAX, SNIPPET_CHARS = 6, 40, 220


@dataclass(frozen=True)
class Entry:
    """A line of docs/README.md."""

    title: str
    file: Path
    about: str

    @property
    def address(self) -> str:
        return address(self.file) or ""


@dataclass(frozen=True)
class Section:
    """A heading of a page with the text up to the next heading."""

    page: str
    title: str
    anchor: str
    text: str


@cache
def files() -> dict[str, Path]:
    """All that is served below ``/docs/``, by name. No other path of the machine can be read."""
    found = {str(path.relative_to(FOLDER)): path for path in sorted(FOLDER.rglob("*")) if path.is_file()}
    return found | {f"{name}.md": path for name, path in BESIDE.items() if path.is_file()}


def page_of(name: str) -> Path | None:
    """The Markdown file, or the folder without a README, whose page has this name. A folder's page lists its files."""
    for candidate in (f"{name}.md", f"{name}/README.md".removeprefix("/")):
        if candidate in files():
            return files()[candidate]
    return FOLDER / name if any(other.startswith(f"{name}/") for other in files()) else None


def address(path: Path) -> str | None:
    """Where a file of the repository is served; None if it is not."""
    for name, beside in BESIDE.items():
        if path == beside:
            return f"/docs/{name}"
    if not path.is_relative_to(FOLDER):
        return None
    name = str(path.relative_to(FOLDER)).removesuffix("README.md").rstrip("/").removeprefix(".")
    if path.suffix != ".md":
        return f"/docs/{name}".rstrip("/") if name in files() or page_of(name) else None
    return f"/docs/{name.removesuffix('.md')}".rstrip("/") if path in files().values() else None


def text_of(path: Path) -> str:
    """The Markdown of a page."""
    if path.is_dir():
        rows = "".join(f"- [{title_of(file)}]({file.name})\n" for file in sorted(path.iterdir()))
        return f"# {path.name.capitalize()}\n\n{rows}"
    return path.read_text()


def title_of(path: Path) -> str:
    match = HEADING.match(text_of(path)) if path.suffix == ".md" else None
    return plain(match[2]) if match else path.name


def groups() -> dict[str, list[Entry]]:
    """The pages of docs/README.md by its headings."""
    found: dict[str, list[Entry]] = {}
    for match in ITEM.finditer((FOLDER / "README.md").read_text()):
        if match["group"]:
            found[match["group"]] = []
        else:
            about = " ".join(match["about"].split())
            file = (FOLDER / match["link"]).resolve()
            file = file / "README.md" if (file / "README.md").is_file() else file
            next(reversed(found.values())).append(Entry(match["title"], file, about))
    return found


def sections(path: Path) -> list[Section]:
    return _sections(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=512)
def _sections(path: Path, version: int) -> list[Section]:
    anchors, fenced = Anchors(), False
    found: list[tuple[str, str, list[str]]] = []
    for line in text_of(path).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and (match := HEADING.fullmatch(line)):
            title = plain(match[2])
            found.append((title, anchors.add(title), []))
        elif found:
            found[-1][2].append(line)
    page = found[0][0] if found else path.stem
    return [Section(page, title, anchor, plain(" ".join(lines))) for title, anchor, lines in found]


def search(query: str) -> Iterator[tuple[Section, str, str]]:
    """(section, address, a part of its text) of sections with all words. Those that name them most often come first."""
    words = query.casefold().split()[:WORDS_MAX]
    hits: list[tuple[int, int, Section, str]] = []
    for name, path in files().items() if words else ():
        for section in sections(path) if name.endswith(".md") and name != "README.md" else ():
            title, text = section.title.casefold(), section.text.casefold()
            if all(word in f"{section.page.casefold()} {title} {text}" for word in words):
                score = sum(10 * (word in title) + min(text.count(word), 9) for word in words)
                hits.append((-score, len(hits), section, f"{address(path)}#{section.anchor}"))
    for _, _, section, link in sorted(hits)[:RESULTS_MAX]:
        place = min((at for word in words if (at := section.text.casefold().find(word)) >= 0), default=0)
        begin = section.text.rfind(" ", 0, max(0, place - SNIPPET_CHARS // 3)) + 1
        yield section, link, textwrap.shorten(section.text[begin:], SNIPPET_CHARS, placeholder=" …")
