"""How a table of the catalogue file is applied and written whose rows are edited in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model, TextField
from django.db.models.functions import Cast

from config.kernel.encryption import DecryptionFailed, decrypt
from config.kernel.yamltext import Node
from runs.catalogue.file import fields
from runs.catalogue.file.base import MISSING, Change, FieldChange, Variables, Work, is_made_of
from runs.catalogue.file.fields import KEPT, REQUIRED, Entry, Field
from runs.tools.base import parse_headers

LOST = object()


@dataclass(frozen=True)
class Rows:
    """A table. ``check`` returns the problems of an entry by column, and ``resolve`` replaces the names of other rows
    in the entries by what the columns hold. ``stays``: whether a row survives a prune.
    """

    name: str
    model: type[Model]
    variable: str
    fields: tuple[Field, ...]
    stays: Callable[[Any], bool]
    check: Callable[[dict[str, Any]], dict[str, str]] = lambda values: {}
    references: tuple[str, ...] = ()

    @property
    def secrets(self) -> list[str]:
        return [field.column for field in self.fields if field.secret]

    def rows(self) -> dict[str, Any]:
        """The rows by name. The secrets' ciphertext is an attribute: perhaps no key decrypts it."""
        hidden = {f"{column}_cipher": Cast(column, TextField()) for column in self.secrets}
        found = self.model._default_manager.defer(*self.secrets).annotate(**hidden)
        return {row.name: row for row in found}

    def read(self, node: Node, work: Work) -> dict[str, Entry]:
        found = fields.read_table(self.name, self.fields, node, work)
        for entry in found.values():
            if problems := self.check(entry.values) or self._problems(entry.values):
                self.note(entry, problems, work)
        return found

    def _problems(self, values: dict[str, Any]) -> dict[str, str]:
        """What the model's own validation says."""
        own = {column: value for column, value in values.items() if column not in self.references}
        try:
            self.model(**own).full_clean(exclude=self.references, validate_unique=False)
        except ValidationError as error:
            return {column: " ".join(texts) for column, texts in error.message_dict.items()}
        return {}

    def note(self, entry: Entry, problems: dict[str, str], work: Work) -> None:
        names = {field.column: f".{field.name}" for field in self.fields}
        for column, problem in problems.items():
            work.wrong(entry.lines.get(column, entry.line), entry.place + names.get(column, ""), problem)

    def resolve(self, entries: dict[str, Entry], rows: dict[str, Any], work: Work) -> None:
        """Add the mistakes that the file alone does not show."""

    def apply(self, found: dict[str, Entry], work: Work) -> None:
        rows = self.rows()
        self.resolve(found, rows, work)
        if work.mistakes:
            return
        changes = {name: self._change(entry, rows, name) for name, entry in found.items()}
        for name, row in rows.items():
            if work.prune and name not in found and row.enabled and not self.stays(row):
                row.enabled = False
                changes[name] = Change(f"{self.name}.{name}", fields=[FieldChange("enabled", True, False)])
        self.complete(found, rows, changes)
        columns = {field.name: {field.column, field.source} - {""} for field in self.fields}
        changed = {name: change for name, change in changes.items() if change.fields or change.is_new}
        for name in sorted(changed, key=lambda name: self.order(rows[name])):
            change = changed[name]
            if change.is_new:
                rows[name].save(force_insert=True)
            else:
                rows[name].save(update_fields=set().union(*(columns[one.name] for one in change.fields)))
        work.changes += changed.values()
        self.warn([rows[name] for name in found], work)

    def complete(self, entries: dict[str, Entry], rows: dict[str, Any], changes: dict[str, Change]) -> None:
        """Add the changes that follow from others."""

    def order(self, row: Any) -> int:
        """In which order rows are saved."""
        return 0

    def warn(self, rows: list[Any], work: Work) -> None:
        """Add warnings about rows that are stored but cannot be used."""

    def _change(self, entry: Entry, rows: dict[str, Any], name: str) -> Change:
        """What the entry changes. Sets it on the row, which is created if there is none."""
        change = Change(entry.place, is_new=name not in rows)
        row = rows[name] if name in rows else rows.setdefault(name, self.model())
        for field in self.fields:
            if field.column not in entry.values:
                continue
            after = entry.values[field.column]
            before = self._value(row, field)
            if change.is_new:
                default = entry.default(field)
                differs = after != (None if default is REQUIRED or default is KEPT else default)
            else:
                differs = before is LOST or not field.same(before, after)
            source, wanted = self._source(row, field), entry.values.get(field.source, "")
            differs = differs or source != wanted
            if differs or change.is_new:
                setattr(row, field.column, after)
                if field.source:
                    setattr(row, field.source, wanted)
            if differs and (field.secret or source or wanted):
                was_set = before is not None and not change.is_new
                change.fields.append(FieldChange(field.name, was_set, after is not None, secret=True))
            elif differs and field.name != "name":
                shown = MISSING if change.is_new else field.show(before)
                change.fields.append(FieldChange(field.name, shown, field.show(after)))
        return change

    def _source(self, row: Any, field: Field) -> str:
        """The text with variables of which the column's value was made; empty if there is none.

        The address may have been changed in the admin since. It still counts as made of that text if only the parts
        that were variables differ.
        """
        source: str = getattr(row, field.source) if field.source else ""
        return source if source and is_made_of(source, getattr(row, field.column)) else ""

    def _value(self, row: Any, field: Field) -> Any:
        """LOST for a secret that no key decrypts."""
        if not field.secret:
            return getattr(row, field.column, None)
        cipher = getattr(row, f"{field.column}_cipher", None)
        try:
            return None if cipher is None else decrypt(cipher)
        except DecryptionFailed:
            return LOST

    def export(self, variables: Variables) -> list[dict[str, Any]]:
        rows = self.rows()
        return [self._written(rows[name], rows, variables) for name in sorted(rows)]

    def _written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        written: dict[str, Any] = {}
        values = {field.column: getattr(row, field.column) for field in self.fields if not field.secret}
        entry = Entry("", 0, values, {})
        for field in self.fields:
            if field.secret:
                self._write_secret(written, field, row, variables)
                continue
            if source := self._source(row, field):
                variables.note(source)
                written[field.name] = source
                continue
            value = self.shown(field, row, rows)
            default = entry.default(field)
            if default is REQUIRED or (value != field.show(default) if default is not KEPT else value):
                written[field.name] = value
        return written

    def shown(self, field: Field, row: Any, rows: dict[str, Any]) -> Any:
        return field.show(getattr(row, field.column))

    def _write_secret(self, written: dict[str, Any], field: Field, row: Any, variables: Variables) -> None:
        if getattr(row, f"{field.column}_cipher") is None:
            return
        if field.read is not fields.headers:
            written[field.name] = variables.placeholder(self.variable, row.name, *_words(field.name))
            return
        value = self._value(row, field)
        if value is LOST:
            raise ValueError(f"No key of ENCRYPTION_KEYS decrypts the headers of {self.name}.{row.name}.")
        names = list(parse_headers(value))
        written[field.name] = {name: variables.placeholder(self.variable, row.name, "HEADER", name) for name in names}


def _words(name: str) -> list[str]:
    """``signingSecret`` as ``SIGNING``, ``SECRET``."""
    return re.findall(r"[A-Z]?[a-z]+", name)
