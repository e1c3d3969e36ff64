"""The catalogue as a YAML file: ``apply`` brings the tables to what a file says, ``export`` writes such a file.

A mistake anywhere changes nothing, and is told with its line and field. Secrets are never written or told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from rest_framework.exceptions import ValidationError
from rest_framework.settings import api_settings

from config.api.serializers import unknown_fields
from config.kernel.jsontext import API_MAX_JSON_DEPTH, same_json, to_text
from config.outbound.urls import same_server
from runs import catalogue
from runs.catalogue import versions, yaml
from runs.catalogue.entries import ENTRIES
from runs.catalogue.entry import Entry, Given, Variables
from runs.catalogue.fields import Hidden, Secret
from runs.catalogue.providers import problem_of
from runs.models import AgentModel, Provider, Tool
from runs.tools.base import BUILTIN, shorten

logger = logging.getLogger(__name__)

LOG_MAX_CHARS = 4000
SHOWN_MAX_CHARS = 300
# The levels of a file around a value of a row.
LEVELS = 3
MISTAKES_MAX = 50
DEMO = "demo"


class CatalogueError(ValueError):
    """The file cannot be applied. Nothing is changed."""


@dataclass(slots=True)
class Change:
    """A row that is added or changed. ``place``: such as ``models.llama``. ``fields``: the lines for people."""

    place: str
    is_new: bool
    fields: dict[str, list[str]]

    def lines(self) -> Iterator[str]:
        yield f"{self.place}: {'added' if self.is_new else 'changed'}"
        for lines in self.fields.values():
            yield from lines

    def summary(self) -> str:
        """Without values, for the log."""
        return f"{self.place} added" if self.is_new else f"{self.place} ({', '.join(self.fields)})"


class Work:
    """One apply: what the file says, the mistakes in it, and what is done. Places are such as ``models.llama``."""

    def __init__(self, source: str, raw: bytes) -> None:
        self.source = source
        self.data: Any = None
        self.lines: dict[yaml.Path, int] = {(): 1}
        self.mistakes: list[tuple[int, str]] = []
        self.changes: list[Change] = []
        self.warnings: list[str] = []
        try:
            if len(raw) > settings.CATALOGUE_MAX_BYTES:
                raise yaml.MalformedYAML(f"At most {settings.CATALOGUE_MAX_BYTES} bytes (CATALOGUE_MAX_BYTES).", 1)
            self.data, self.lines = yaml.parse(raw, depth=API_MAX_JSON_DEPTH + LEVELS)
            if not isinstance(self.data, dict):
                raise yaml.MalformedYAML(f"A mapping of {', '.join(ENTRIES)} is required.", 1)
        except yaml.MalformedYAML as error:
            self.mistakes = [(error.line, error.message)]
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
        place = [self._label(path) if isinstance(key, int) else str(key)[:100] for key in path[:LEVELS]]
        message = detail if isinstance(detail, str) else " ".join(map(str, detail))
        self.mistakes.append((self.lines[known], ": ".join(filter(None, [".".join(place), message]))))

    def _label(self, path: yaml.Path) -> str:
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
        raise CatalogueError("\n".join(map(_printable, lines)))

    def read(self, key: str, entry: Entry) -> dict[str, Given]:
        """The valid entries by their names; the mistakes of the others are noted."""
        value, found, items = self.data[key], dict[str, Given](), list[tuple[yaml.Path, Any]]()
        if not entry.is_list:
            items = [((key,), value)] if value is not None else []
        elif isinstance(value, list):
            items = [((key, index), item) for index, item in enumerate(value)]
        else:
            self.wrong((key,), "A list is required; [] is the empty one.")
        for path, item in items:
            if len(self.mistakes) > MISTAKES_MAX:
                break
            try:
                values = dict(entry.validated(item))
            except ValidationError as error:
                self.wrong(path, error.detail)
                continue
            if (name := values.get("name", "")) in found:
                self.wrong((*path, "name"), "The name is there twice.")
            found.setdefault(name, Given(path, values))
        return found

    def apply(self, key: str, entry: Entry, entries: dict[str, Given], prune: bool) -> None:
        """Store the entries of one kind."""
        rows, listed = entry.rows(), set(entries)
        entry.complete(entries, rows, self.wrong)
        self.stop()
        for name, row in rows.items() if prune else ():
            if name not in listed and row.enabled and not _survives(row):
                entries.setdefault(name, Given((), {})).values["enabled"] = False
        # Two defaults would break a constraint.
        for name, given in sorted(entries.items(), key=lambda one: bool(one[1].values.get("is_default"))):
            is_new = name not in rows
            row = entry.blank("", "") if is_new else rows[name]
            change = Change(f"{key}.{name}" if name else key, is_new, _change(entry, row, given, is_new))
            if not change.fields and not is_new:
                continue
            try:
                self.changes += [change] if entry.store(row, given, is_new, change.fields) else []
            except ValidationError as error:
                self.wrong(given.path, error.detail)
        self.stop()


def apply(source: str, raw: bytes, *, prune: bool = False, check: bool = False) -> Work:
    """Bring the catalogue to what the file says; with ``check``, only find out what would change. ``prune`` disables
    the rows that a table of the file does not list. ``source`` names the file in messages.

    Raises CatalogueError. Resolves a host on the network: no transaction may be open.
    """
    work = Work(source, raw)
    work.wrong((), unknown_fields(work.data, ENTRIES))
    found = {key: work.read(key, entry) for key, entry in ENTRIES.items() if key in work.data}
    work.stop()
    with transaction.atomic():
        _lock()
        for key, entries in found.items():
            work.apply(key, ENTRIES[key], entries, prune)
        work.warnings = list(_warnings())
        if check:
            transaction.set_rollback(True)
        else:
            transaction.on_commit(catalogue.forget)
    if work.changes and not check:
        summary = "; ".join(change.summary() for change in work.changes)
        logger.info("the catalogue file changed %s", shorten(summary, LOG_MAX_CHARS))
    return work


def _lock() -> None:
    """Two files are applied one after the other. On SQLite, each transaction that writes does that.

    Readers of the tables do not wait. Locked rows would not suffice: a table may have none.
    """
    if connection.vendor == "postgresql":
        names = (model._meta.db_table for model in (Provider, AgentModel, Tool))
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {', '.join(names)} IN SHARE ROW EXCLUSIVE MODE")


def _change(entry: Entry, row: Any, given: Given, is_new: bool) -> dict[str, list[str]]:
    """Give the row the entry's values. Returns what differs then, as lines for people."""
    moved = (column for column in entry.addresses if column in given.values)
    if not is_new and not all(same_server(getattr(row, column), given.values[column]) for column in moved):
        # The stored secrets are for the stored address.
        secrets = (str(field.source) for field in entry.fields.values() if isinstance(field, Secret))
        given.values = dict.fromkeys(secrets) | given.values
    before = entry.to_representation(row)
    for column, value in given.values.items():
        setattr(row, column, value)
    after = entry.to_representation(row)
    return {
        name: _lines(name, before[name], value, is_new)
        for name, value in after.items()
        if name != "name" and not _same(before[name], value)
    }


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Hidden) or isinstance(after, Hidden):
        return bool(before == after)
    return same_json(before, after)


def _lines(name: str, before: Any, after: Any, is_new: bool) -> list[str]:
    if isinstance(before, Hidden) or isinstance(after, Hidden):
        return [f"  {name}: {'removed' if not after else 'changed' if before else 'set'}"]
    if is_new:
        return [f"  {name}: {_shown(after)}"]
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        difference = list(unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))
        # The first two lines name files. JSON has no control characters, which would reach the terminal.
        return [f"  {name}:"] + [f"    {line[0]} {_shown(line[1:])[1:-1]}" for line in difference[2:] if line[0] != "@"]
    return [f"  {name}: {_shown(before)} → {_shown(after)}"]


def _survives(row: Any) -> bool:
    """Whether a prune leaves a row enabled, because it is part of each installation."""
    return (isinstance(row, (Provider, AgentModel)) and row.name == DEMO) or getattr(row, "node_type", "") == BUILTIN


def _shown(value: Any) -> str:
    return shorten(to_text(value), SHOWN_MAX_CHARS)


def _printable(line: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def _warnings() -> Iterator[str]:
    """What of the catalogue cannot be used, or uses what is not offered."""
    models = AgentModel.objects.filter(enabled=True).order_by("name")
    usable = models.filter(provider__enabled=True)
    offered = set(usable.values_list("name", flat=True))
    for row in Provider.objects.filter(models__in=usable).only("name").order_by("name").distinct():
        if problem := problem_of(row):
            yield f"providers.{row.name} cannot be used yet: {problem}"
    if not usable.filter(is_default=True).exists():
        yield "No enabled model is the default: runs must name one."
    for name, provider, fallbacks in models.values_list("name", "provider__name", "fallbacks"):
        if name not in offered:
            yield f"models.{name} cannot be used: its provider {provider} is disabled."
        for fallback in fallbacks if name in offered else ():
            if fallback not in offered:
                yield f"models.{name} has no fallback {fallback}: it is not offered."
    if settings.RUN_SUMMARY_MODEL and settings.RUN_SUMMARY_MODEL not in offered:
        yield f"RUN_SUMMARY_MODEL is {settings.RUN_SUMMARY_MODEL}, which is not offered."
    tools = set(Tool.objects.filter(enabled=True).values_list("name", flat=True))
    for name, agent in versions.listed().items():
        if agent.model is not None and agent.model not in offered:
            yield f"agents.{name} cannot be used: its model {agent.model} is not offered."
        for tool in agent.tools or ():
            if tool not in tools:
                yield f"agents.{name} does not get the tool {tool}, which is disabled."


def export() -> str:
    """The catalogue as a file without secrets. Raises ValueError if a part of it cannot be read."""
    variables, written = Variables(), dict[str, Any]()
    with transaction.atomic():
        for key, entry in ENTRIES.items():
            rows = entry.rows()
            items = [entry.written(rows[name], rows, variables) for name in sorted(rows)]
            if items:
                written[key] = items if entry.is_list else items[0]
    comment = ["The catalogue (docs/catalogue.md).", *variables.notes]
    if variables.names:
        comment += ["Secrets are variables of the environment in which the file is applied:"]
        comment += [f"  {name}" for name in variables.names]
    return "".join(f"# {_printable(line)}\n" for line in comment) + yaml.to_text(written)


def read_file(path: Path) -> bytes:
    """The file, and one byte more than is allowed at most. Raises ValueError."""
    try:
        with path.open("rb") as file:
            return file.read(settings.CATALOGUE_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
