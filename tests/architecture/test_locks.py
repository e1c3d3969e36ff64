"""FOR UPDATE also waits for, and stops, every insert of a row that refers to the locked one, so it needs a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_rules import OWN_APPS, ROOT, strings

# The function that locks FOR UPDATE, and why.
REASONS = {
    "config/database/batches.py:take_batch": "rows that its caller deletes in the same transaction (to_delete)",
    "runs/privacy.py:_rename": "a user whose last rows are looked for: no request may add one meanwhile",
}
# The methods of a queryset that lock. ``update_or_create`` cannot do it weakly.
LOCKING = {"select_for_update", "update_or_create", "aupdate_or_create"}


def locks(path: Path) -> Iterator[str]:
    """The functions that lock FOR UPDATE, by the ORM or in SQL text."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    weak = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_weak(node)}
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in LOCKING and id(node) not in weak
    ]
    found += [line for line, text in strings(path) if "FOR UPDATE" in text.upper()]
    for line in found:
        inside = [node for node in functions if node.lineno <= line <= (node.end_lineno or node.lineno)]
        name = max(inside, key=lambda node: node.lineno).name if inside else "(module)"
        yield f"{path.relative_to(ROOT)}:{name}"


def is_weak(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    return isinstance(given.get("no_key"), ast.Constant) and given["no_key"].value is True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_lock_for_update_has_a_reason() -> None:
    found = {place for app in OWN_APPS for path in (ROOT / app).rglob("*.py") for place in locks(path)}
    assert found == REASONS.keys()
