"""docs/security.md names tests, files and settings that exist, and covers every chapter."""

import ast
import re
from functools import cache
from pathlib import Path

from config.settings import ENV

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
CHAPTERS = [f"API{number}" for number in range(1, 11)] + [f"V{number}" for number in range(1, 18)]
WITHOUT_PROMISES = {"V17"}


@cache
def functions_of(path: str) -> set[str]:
    """The names of the test functions of a file. Empty if there is no such file."""
    if not (ROOT / path).exists():
        return set()
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {function.name for function in functions if function.name.startswith("test_")}


def sections() -> dict[str, str]:
    """The text of each chapter by its number."""
    parts = re.split(r"^### (\w+) .*$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 100
    missing = [
        f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in functions_of(path)
    ]
    assert missing == []


def test_every_chapter_has_promises_with_tests() -> None:
    found = sections()
    assert list(found) == CHAPTERS
    for chapter, text in found.items():
        rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| Promise")]
        assert bool(rows) == (chapter not in WITHOUT_PROMISES), chapter
        assert [row for row in rows if "`tests/" not in row] == []


def test_every_named_file_and_setting_exists() -> None:
    spans = set(re.findall(r"`([^`\n]+)`", PAGE))
    paths = {span for span in spans if re.fullmatch(r"[\w.-]+(/[\w.-]+)+|[\w-]+\.(py|yaml|txt|md)|Dockerfile", span)}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    variables = {span for span in spans if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", span)}
    assert len(variables) > 20
    assert variables <= ENV.known.keys()
