"""The catalogue as a YAML file. If it has a mistake, nothing changes. Secrets are never exported or shown."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from difflib import unified_diff
from operator import itemgetter
from typing import Any

from django.conf import settings
from django.db import transaction
from rest_framework.exceptions import ValidationError
from rest_framework.settings import api_settings

from config.api.serializers import unknown_fields
from config.kernel.jsontext import API_MAX_JSON_DEPTH, to_text
from config.outbound.addresses import same_server
from runs import catalogue
from runs.catalogue import rules, yaml
from runs.catalogue.definitions import problem_of
from runs.catalogue.entries import ENTRIES, Entry, Given
from runs.catalogue.rules import Address, variables_of
from runs.models import AgentModel, Provider
from runs.tools.base import BUILTIN, shorten

logger = logging.getLogger(__name__)

LOG_MAX_CHARS = 4000
SHOWN_MAX_CHARS = 300
LEVELS = 3  # the levels of the file above a value of a row
MISTAKES_MAX = 50


class Work:
    """One application of a file: its content, its mistakes and its changes. ``changes`` has lines for people, by the
    path of the row.
    """

    def __init__(self, source: str, raw: bytes) -> None:
        self.source, self.mistakes, self.warnings = source, list[tuple[int, str]](), list[str]()
        self.changes: dict[str, list[str]] = {}
        try:
            if len(raw) > settings.CATALOGUE_MAX_BYTES:
                raise yaml.MalformedYAML(f"At most {settings.CATALOGUE_MAX_BYTES} bytes (CATALOGUE_MAX_BYTES).", 1)
            self.data, self.lines = yaml.parse(raw, depth=API_MAX_JSON_DEPTH + LEVELS)
            if not isinstance(self.data, dict):
                raise yaml.MalformedYAML(f"A mapping of {', '.join(ENTRIES)} is required.", 1)
        except yaml.MalformedYAML as error:
            self.mistakes.append((error.line, error.message))
            self.stop()

    def wrong(self, path: yaml.Path, detail: Any) -> None:
        """Record a mistake, or all mistakes of a ValidationError's ``detail``. No message repeats a secret."""
        if isinstance(detail, dict):
            for name, inner in detail.items():
                self.wrong(path if name == api_settings.NON_FIELD_ERRORS_KEY else (*path, name), inner)
            return
        known = path
        while known not in self.lines:
            known = known[:-1]
        place = [str(key)[:100] for key in path[:LEVELS]]
        if len(path) > 1 and isinstance(path[1], int):  # an entry of a list
            entry = self.data[path[0]][path[1]]
            name = entry.get("name") if isinstance(entry, dict) else None
            place[1] = name[:100] if isinstance(name, str) and name else f"({path[1] + 1})"
        message = detail if isinstance(detail, str) else " ".join(map(str, detail))
        self.mistakes.append((self.lines[known], ": ".join(filter(None, [".".join(place), message]))))

    def stop(self) -> None:
        """Raises ValueError if there are mistakes."""
        lines = [f"{self.source}, line {line}: {text}" for line, text in sorted(self.mistakes, key=itemgetter(0))]
        if len(lines) > MISTAKES_MAX:
            lines[MISTAKES_MAX:] = ["… and more"]
        if lines:  # names from the file must not send control characters to the terminal
            raise ValueError("\n".join(map(_printable, lines)))

    def items(self, key: str, entry: Entry) -> list[tuple[yaml.Path, Any]]:
        value = self.data.get(key)
        if not entry.is_list:
            return [((key,), value)] if value is not None else []
        return [((key, index), item) for index, item in enumerate(value)] if isinstance(value, list) else []

    def read(self, key: str, entry: Entry) -> dict[str, Given]:
        """The valid entries by name; the mistakes of the others are recorded."""
        found = dict[str, Given]()
        if entry.is_list and not isinstance(self.data[key], list):
            self.wrong((key,), "A list is required; [] is the empty one.")
        for path, item in self.items(key, entry):
            if len(self.mistakes) > MISTAKES_MAX:
                break
            try:
                values = dict(entry.validated(item))
            except ValidationError as error:
                self.wrong(path, error.detail)
                continue
            if (name := values.get("name", "")) in found:
                self.wrong((*path, "name"), "The name is there twice.")
            found.setdefault(name, (path, values))
        return found

    def apply(self, key: str, entry: Entry, entries: dict[str, Given], prune: bool) -> None:
        rows = entry.rows()
        entry.complete(entries, rows, self.wrong)
        self.stop()
        for name, row in rows.items() if prune else ():
            is_demo = isinstance(row, (Provider, AgentModel)) and name == "demo"
            is_kept = is_demo or getattr(row, "node_type", "") == BUILTIN  # these are part of each installation
            if name not in entries and row.enabled and not is_kept:
                entry.disable(name)
                self.note(key, name, "changed", ["  enabled: true → false"])
        for name, (path, values) in entries.items():
            is_new = name not in rows
            row = entry.blank("", "") if is_new else rows[name]
            changed, lines = _change(entry, row, values, is_new)
            try:
                if changed or is_new:
                    entry.store(row, values, is_new, changed)
                    self.note(key, name, "added" if is_new else "changed", lines)
            except ValidationError as error:
                self.wrong(path, error.detail)
        self.stop()

    def note(self, key: str, name: str, what: str, lines: list[str]) -> None:
        place = f"{key}.{name}" if name else key
        self.changes[place] = [f"{place}: {what}", *lines]


def apply(source: str, raw: bytes, *, prune: bool = False, check: bool = False) -> Work:
    """Change the catalogue to what the file says; with ``check``, only find out what would change. ``prune`` also
    disables rows that a list of the file lacks. ``source``: the name of the file. Raises ValueError. Resolves a
    host name on the network, so no transaction may be open.
    """
    work = Work(source, raw)
    work.wrong((), unknown_fields(work.data, ENTRIES))
    found = {key: work.read(key, entry) for key, entry in ENTRIES.items() if key in work.data}
    work.stop()
    with transaction.atomic():
        rules.lock()
        for key, entries in found.items():
            work.apply(key, ENTRIES[key], entries, prune)
        work.warnings = list(_warnings())
        if check:
            transaction.set_rollback(True)
        else:
            transaction.on_commit(catalogue.forget)
    if work.changes and not check:
        logger.info("the catalogue file changed %s", shorten(", ".join(work.changes), LOG_MAX_CHARS))
    return work


def standing(source: str, raw: bytes, key: str, name: str) -> tuple[int, list[str]] | None:
    """The line at which the file lists the row, and the fields in which the two differ; None if it does not list the
    row. No fields if the entry has a mistake, such as a variable that this process lacks. Raises ValueError.
    """
    work, entry = Work(source, raw), ENTRIES[key]
    listed = ((path, item) for path, item in work.items(key, entry) if isinstance(item, dict))
    path, item = next((one for one in listed if one[1].get("name", "") == name), ((), None))
    if item is None:
        return None
    rows, changed = entry.rows(), list[str]()
    with suppress(ValidationError):
        values = dict(entry.validated(item))
        entry.complete({name: (path, values)}, rows, work.wrong)
        if name in rows and not work.mistakes:
            changed = _change(entry, rows[name], values, False)[0]
    return work.lines[path], _fields(entry, changed)


def _change(entry: Entry, row: Any, values: dict[str, Any], is_new: bool) -> tuple[list[str], list[str]]:
    """Give the row the values, without saving it. Returns the columns that change, and lines for people."""
    moved = (column for column in entry.addresses if column in values)
    if not is_new and not all(same_server(getattr(row, column), values[column]) for column in moved):
        # The stored secrets belong to the stored address: a new server does not get them.
        values |= dict.fromkeys(entry.secrets) | values
    before = entry.to_representation(row)
    changed = [column for column, value in values.items() if column != "name" and entry.differs(row, column, value)]
    for column, value in values.items():
        setattr(row, column, value)
    after, lines = entry.to_representation(row), list[str]()
    for name in _fields(entry, changed):
        field = entry.fields[name]
        is_secret = field.write_only or (isinstance(field, Address) and variables_of(before[name] + after[name]))
        lines += [f"  {name}: changed"] if is_secret else _lines(name, before[name], after[name], is_new)
    return changed, lines


def _fields(entry: Entry, columns: list[str]) -> list[str]:
    return [name for name, field in entry.fields.items() if {field.source, f"{field.source}_source"} & set(columns)]


def _lines(name: str, before: Any, after: Any, is_new: bool) -> list[str]:
    if is_new:
        return [f"  {name}: {_shown(after)}"]
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        difference = list(unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))
        # The first two lines name files. The texts are shown as JSON, without control characters for the terminal.
        return [f"  {name}:"] + [f"    {line[0]} {_shown(line[1:])[1:-1]}" for line in difference[2:] if line[0] != "@"]
    return [f"  {name}: {_shown(before)} → {_shown(after)}"]


def _shown(value: Any) -> str:
    return shorten(to_text(value), SHOWN_MAX_CHARS)


def _printable(line: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def _warnings() -> Iterator[str]:
    usable = AgentModel.objects.filter(enabled=True, provider__enabled=True)
    for row in Provider.objects.filter(models__in=usable).only("name").order_by("name").distinct():
        if problem := problem_of(row):
            yield f"providers.{row.name} cannot be used yet: {problem}"
    if not usable.filter(is_default=True).exists():
        yield "No enabled model is the default: runs must name one."
    for name, agent in catalogue.current_agents().items():
        if agent.model is not None and not usable.filter(name=agent.model).exists():
            yield f"agents.{name} cannot be used: its model {agent.model} is not offered."


def export() -> str:
    """The catalogue as the text of a file without secrets. Raises ValueError if a part of it cannot be read."""
    variables, written = list[str](), dict[str, Any]()
    with transaction.atomic():
        for key, entry in ENTRIES.items():
            rows = entry.rows()
            items = [entry.written(rows[name], rows, variables) for name in sorted(rows)]
            if items:
                written[key] = items if entry.is_list else items[0]
    comment = "# The catalogue (docs/catalogue.md).\n"
    if variables:
        comment += "# Secrets are variables of the environment in which the file is applied:\n"
        comment += "".join(f"#   {_printable(name)}\n" for name in variables)
    return comment + yaml.to_text(written)
