"""What the sections of the catalogue file share: mistakes, changes, and secrets that the environment holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import unified_diff
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Protocol

from config.kernel.jsontext import to_text
from config.kernel.yamltext import Node
from runs.tools.base import shorten

MISTAKES_MAX = 50
SHOWN_MAX_CHARS = 300
VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")


class Misplaced(ValueError):
    """A mistake in a part of a field, with its own line."""

    def __init__(self, message: str, line: int) -> None:
        self.line = line
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Mistake:
    """``place``: the dotted path of a field, empty for the whole file. No message repeats a secret."""

    line: int
    place: str
    message: str


class CatalogueError(ValueError):
    """The file cannot be applied. Nothing is changed."""

    def __init__(self, source: str, mistakes: list[Mistake]) -> None:
        self.mistakes = sorted(mistakes, key=lambda mistake: mistake.line)
        lines = [
            f"{source}, line {mistake.line}: {mistake.place}{': ' if mistake.place else ''}{mistake.message}"
            for mistake in self.mistakes[:MISTAKES_MAX]
        ]
        if len(mistakes) > MISTAKES_MAX:
            lines.append("… and more")
        # Names of the file must not control the terminal.
        super().__init__("\n".join(map(printable, lines)))


@dataclass(frozen=True, slots=True)
class FieldChange:
    """``before`` and ``after`` as the file shows them, of a secret whether it is set. ``before`` is MISSING in a new
    row.
    """

    name: str
    before: Any
    after: Any
    secret: bool = False

    def lines(self) -> Iterator[str]:
        if self.secret:
            yield f"  {self.name}: {'removed' if not self.after else 'changed' if self.before is True else 'set'}"
        elif self.before is MISSING:
            yield f"  {self.name}: {_shown(self.after)}"
        elif isinstance(self.before, str) and isinstance(self.after, str) and "\n" in self.before + self.after:
            yield f"  {self.name}:"
            difference = unified_diff(self.before.splitlines(), self.after.splitlines(), n=1, lineterm="")
            # The first two lines name files. JSON has no control characters, which would reach the terminal.
            yield from (f"    {line[0]} {_shown(line[1:])[1:-1]}" for line in list(difference)[2:] if line[0] != "@")
        else:
            yield f"  {self.name}: {_shown(self.before)} → {_shown(self.after)}"


class Missing:
    """The type of ``MISSING``."""


MISSING = Missing()


@dataclass(slots=True)
class Change:
    """A row that is added or changed. ``place``: such as ``models.llama``."""

    place: str
    is_new: bool = False
    fields: list[FieldChange] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield f"{self.place}: {'added' if self.is_new else 'changed'}"
        for change in self.fields:
            yield from change.lines()

    def summary(self) -> str:
        """Without values, for the log."""
        return f"{self.place} added" if self.is_new else f"{self.place} ({', '.join(one.name for one in self.fields)})"


@dataclass(slots=True)
class Work:
    """One apply: what the sections found and did."""

    prune: bool
    mistakes: list[Mistake] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def wrong(self, line: int, place: str, message: str) -> None:
        self.mistakes.append(Mistake(line, place, message))


class Section(Protocol):
    """A key of the file. ``read`` checks what can be checked without the other sections; ``apply`` is called in the
    transaction. Both add their mistakes to the work.
    """

    @property
    def name(self) -> str: ...

    def read(self, node: Node, work: Work) -> Any: ...

    def apply(self, found: Any, work: Work) -> None: ...

    def export(self, variables: Variables) -> Any: ...


class Variables:
    """The names of the variables that stand for secrets in an exported file, and what else its head says."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.notes: list[str] = []

    def note(self, source: str) -> None:
        """Name the variables of a text that is written as it is."""
        found = dict.fromkeys(match[1] for match in VARIABLE.finditer(source) if match[1] is not None)
        self.names += [name for name in found if name not in self.names]

    def placeholder(self, *parts: str) -> str:
        base = "_".join(re.sub(r"[^A-Z0-9]+", "_", part.upper()).strip("_") for part in parts)
        name, number = base, 1
        while name in self.names:
            number += 1
            name = f"{base}_{number}"
        self.names.append(name)
        return f"${{{name}}}"


def printable(line: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def with_variables(text: str) -> str:
    """``text`` with each ``${NAME}`` replaced from the environment; ``$${`` stands for ``${``. Raises ValueError."""
    return VARIABLE.sub(_variable, text)


def has_variable(text: Any) -> bool:
    return isinstance(text, str) and any(found[1] is not None for found in VARIABLE.finditer(text))


def is_made_of(source: str, text: str) -> bool:
    """Whether ``with_variables`` can have made ``text`` of ``source``, with whatever values."""
    return fnmatchcase(text, VARIABLE.sub(lambda found: "${" if found[1] is None else "*", escape(source)))


def _variable(found: re.Match[str]) -> str:
    name = found[1]
    if name is None:
        return "${"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", name) or not found[0].endswith("}"):
        raise ValueError("Write ${VARIABLE}, or $${ for the text ${.")
    if not os.environ.get(name):
        raise ValueError(f"The environment has no variable {name}, or it is empty.")
    return os.environ[name]


def _shown(value: Any) -> str:
    return shorten(to_text(value), SHOWN_MAX_CHARS)
