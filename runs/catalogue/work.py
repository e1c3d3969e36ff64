"""What an apply and an export of the catalogue file note: mistakes, changes, and variables for secrets."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from rest_framework.settings import api_settings

from config.kernel import jsontext
from runs.catalogue import yaml
from runs.catalogue.entries import VARIABLE

# The levels of a file around a value of a row.
LEVELS = 3
MISTAKES_MAX = 50


class CatalogueError(ValueError):
    """The file cannot be applied. Nothing is changed."""


@dataclass(slots=True)
class Change:
    """A row that is added or changed. ``place``: such as ``models.llama``. ``fields``: the lines for people."""

    place: str
    is_new: bool
    fields: dict[str, list[str]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield f"{self.place}: {'added' if self.is_new else 'changed'}"
        for lines in self.fields.values():
            yield from lines

    def summary(self) -> str:
        """Without values, for the log."""
        return f"{self.place} added" if self.is_new else f"{self.place} ({', '.join(self.fields)})"


class Work:
    """One apply: what the file says, the mistakes in it, and what is done."""

    def __init__(self, source: str, raw: bytes, prune: bool) -> None:
        self.source, self.prune = source, prune
        self.data: Any = None
        self.lines: dict[yaml.Path, int] = {(): 1}
        self.mistakes: list[tuple[int, str]] = []
        self.changes: list[Change] = []
        self.warnings: list[str] = []
        self.listed: dict[str, set[str]] = defaultdict(set)
        self.disabled: dict[str, set[str]] = defaultdict(set)
        if len(raw) > settings.CATALOGUE_MAX_BYTES:
            self.wrong((), f"At most {settings.CATALOGUE_MAX_BYTES} bytes (CATALOGUE_MAX_BYTES).")
            self.stop()
        try:
            self.data, self.lines = yaml.parse(raw, depth=jsontext.API_MAX_JSON_DEPTH + LEVELS)
        except yaml.MalformedYAML as error:
            self.lines[()] = error.line
            self.wrong((), error.message)
            self.stop()

    def wrong(self, path: yaml.Path, detail: Any) -> None:
        """Note a mistake, or those of a ValidationError's ``detail``. No message repeats a secret."""
        if isinstance(detail, dict):
            for name, inner in detail.items():
                self.wrong(path if name == api_settings.NON_FIELD_ERRORS_KEY else (*path, name), inner)
            return
        known = path
        while known not in self.lines:
            known = known[:-1]
        place = [self.label(path) if isinstance(key, int) else str(key)[:100] for key in path[:LEVELS]]
        message = detail if isinstance(detail, str) else " ".join(map(str, detail))
        self.mistakes.append((self.lines[known], ": ".join(filter(None, [".".join(place), message]))))

    def label(self, path: yaml.Path) -> str:
        """An entry's name, or its number in the list."""
        entry = self.data[path[0]][path[1]]
        name = entry.get("name") if isinstance(entry, dict) else None
        return name[:100] if isinstance(name, str) and name else f"({int(path[1]) + 1})"

    def stop(self) -> None:
        """Raises CatalogueError if there are mistakes."""
        if not self.mistakes:
            return
        found = sorted(self.mistakes, key=lambda mistake: mistake[0])
        lines = [f"{self.source}, line {line}: {text}" for line, text in found[:MISTAKES_MAX]]
        lines += ["… and more"] if len(found) > MISTAKES_MAX else []
        # Names of the file must not control the terminal.
        raise CatalogueError("\n".join(map(printable, lines)))


@dataclass(slots=True)
class Given:
    """An entry of the file: where it stands, and the columns that it sets."""

    path: yaml.Path
    values: dict[str, Any] = field(default_factory=dict)


class Variables:
    """The names of the variables that stand for secrets in an exported file, and what else its head says."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.notes: list[str] = []

    def note(self, source: str) -> None:
        """Name the variables of a text that is written as it is."""
        found = (match[1] for match in VARIABLE.finditer(source) if match[1] is not None)
        self.names = list(dict.fromkeys([*self.names, *found]))

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
