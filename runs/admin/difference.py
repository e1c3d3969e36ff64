"""The difference of two texts, line by line, as rows of a table with two columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

# Equal lines that are shown before and after a difference.
CONTEXT_LINES = 3
# The time of a comparison can grow with the third power of the number of lines.
COMPARED_LINES_MAX = 400


@dataclass(frozen=True, slots=True)
class Row:
    """``changed``: the sides differ. ``skipped``: so many equal lines are not shown here."""

    left: str = ""
    right: str = ""
    changed: bool = False
    skipped: int = 0


def rows(left: Sequence[str], right: Sequence[str]) -> list[Row]:
    """The differences with some lines around them. Where there are too many lines between the first and the last
    difference, all of these count as changed.
    """
    start = _equal_at_start(left, right)
    end = _equal_at_start(left[start:][::-1], right[start:][::-1])
    a, b = left[start : len(left) - end], right[start : len(right) - end]
    parts: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, len(a), 0, len(b))]
    if max(len(a), len(b)) <= COMPARED_LINES_MAX:
        parts = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    found = [Row(line, line) for line in left[:start]]
    for kind, from_a, to_a, from_b, to_b in parts:
        for at in range(max(to_a - from_a, to_b - from_b)):
            one = a[from_a + at] if from_a + at < to_a else ""
            other = b[from_b + at] if from_b + at < to_b else ""
            found.append(Row(one, other, kind != "equal"))
    found += [Row(line, line) for line in left[len(left) - end :]]
    return _without_equal(found)


def _equal_at_start(left: Sequence[str], right: Sequence[str]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _without_equal(found: list[Row]) -> list[Row]:
    changes = [at for at, row in enumerate(found) if row.changed]
    near = {at + step for at in changes for step in range(-CONTEXT_LINES, CONTEXT_LINES + 1)}
    shown: list[Row] = []
    for at, row in enumerate(found):
        if at in near:
            shown.append(row)
        elif shown and shown[-1].skipped:
            shown[-1] = Row(skipped=shown[-1].skipped + 1)
        else:
            shown.append(Row(skipped=1))
    return shown
