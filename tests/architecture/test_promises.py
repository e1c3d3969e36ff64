"""The index of promises names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
INDEX = (TESTS / "promises.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+/test_\w+\.py)::(\w+|\*)`")
ROWS = [line for line in INDEX.splitlines() if line.startswith("| ") and not line.startswith("| Promise |")]


def test_each_named_test_exists():
    missing = []
    for path, name in NAMED.findall(INDEX):
        source = (TESTS / path).read_text(encoding="utf-8") if (TESTS / path).exists() else ""
        if not re.search(r"def test_\w+\(" if name == "*" else rf"def test_{name}\(", source):
            missing.append(f"{path}::{name}")
    assert not missing


def test_each_promise_names_a_test():
    assert len(ROWS) > 80
    assert [row for row in ROWS if not NAMED.search(row)] == []
