"""Plain INSERTs and UPDATEs whose SQL is compiled once, and groups of them as one statement.

The number of statements in a transaction decides its cost, in this process and in the database, and how long it holds
its locks. PostgreSQL therefore executes a whole group as one statement. SQLite, which needs no round trip, executes the
group one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, connections, models

from config.database.protected import Key, require_key


class _Insert(NamedTuple):
    model: type[models.Model]
    rows: int


class _Update(NamedTuple):
    model: type[models.Model]
    changes: tuple[str, ...]
    where: tuple[str, ...]
    nulls: tuple[str, ...]


# The part of a statement that its SQL depends on; the values are the rest.
_Shape = _Insert | _Update | str
FIRST = "first"
# Compiled statements that are kept of each kind. The number of inserted rows is part of a shape, and a model decides
# it, so there is no end of shapes; those of a process's usual work are few.
SHAPES_MAX = 256


class Writes:
    """Writes that happen together, inside the caller's transaction. If the first write changes no row, the others
    change nothing either.

    No write sees what the others write, and no two may write the same row.
    """

    def __init__(self) -> None:
        self.shapes: list[_Shape] = []
        self.values: list[list[Any]] = []
        self.inserted: list[models.Model] = []
        self.listeners: list[tuple[int, Callable[[], None]]] = []

    def insert(self, *rows: models.Model) -> None:
        """INSERT rows of one model as they are: the database defaults of their columns are not applied.

        For models whose primary key is known before the INSERT, or not needed after it.
        """
        if rows:
            db = connections[DEFAULT_DB_ALIAS]
            fields = _inserted_fields(type(rows[0]))
            values = [field.get_db_prep_save(field.pre_save(row, add=True), db) for row in rows for field in fields]
            self._add(_Insert(type(rows[0]), len(rows)), values)
            self.inserted += rows

    def update(
        self, model: type[models.Model], where: Mapping[str, Any], changes: Mapping[str, Any], key: Key | None = None
    ) -> None:
        """UPDATE the rows whose fields have the values of ``where``, which may be None.

        Fields are named by attribute (``chat_id``, not ``chat``), and the values are plain: no expressions. Protected
        fields change only with the model's ``key``.
        """
        require_key(model, changes, key)
        db = connections[DEFAULT_DB_ALIAS]
        fields = _fields(model)
        if unknown := {*changes, *where} - set(fields):
            raise FieldDoesNotExist(f"{model.__name__} has no fields {', '.join(sorted(unknown))}")
        nulls = tuple(name for name, value in where.items() if value is None)
        values = [fields[name].get_db_prep_save(value, db) for name, value in changes.items()]
        values += [fields[name].get_db_prep_value(value, db) for name, value in where.items() if value is not None]
        self._add(_Update(model, tuple(changes), tuple(where), nulls), values)

    def execute(self, sql: str, values: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        """Any INSERT or UPDATE that ends with its WHERE clause. ``then`` is called if it changed a row."""
        if then is not None:
            self.listeners.append((len(self.shapes), then))
        self._add(sql, list(values))

    def include(self, others: Writes) -> None:
        self.listeners += [(len(self.shapes) + index, then) for index, then in others.listeners]
        self.shapes += others.shapes
        self.values += others.values
        self.inserted += others.inserted

    def do(self) -> int:
        """Execute all writes. Returns how many rows the first one changed."""
        changed = self._at_once() if connections[DEFAULT_DB_ALIAS].vendor == "postgresql" else self._in_steps()
        if changed[0]:
            for row in self.inserted:
                row._state.adding, row._state.db = False, DEFAULT_DB_ALIAS
            for index, then in self.listeners:
                if changed[index]:
                    then()
        return changed[0]

    def _add(self, shape: _Shape, values: list[Any]) -> None:
        self.shapes.append(shape)
        self.values.append(values)

    def _in_steps(self) -> list[int]:
        changed: list[int] = []
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            for shape, values in zip(self.shapes, self.values, strict=True):
                cursor.execute(_alone(shape), values)
                changed.append(int(cursor.rowcount))
                if not changed[0]:
                    break
        return changed

    def _at_once(self) -> list[int]:
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            cursor.cursor.stable = True  # the results are counts
            if len(self.shapes) == 1:
                cursor.execute(_alone(self.shapes[0]), self.values[0])
                return [int(cursor.rowcount)]
            cursor.execute(_together(tuple(self.shapes)), list(chain.from_iterable(self.values)))
            return list(cursor.fetchone())


def insert(*rows: models.Model) -> None:
    """``Writes.insert`` alone."""
    writes = Writes()
    writes.insert(*rows)
    writes.do()


def update(
    model: type[models.Model], where: Mapping[str, Any], changes: Mapping[str, Any], key: Key | None = None
) -> int:
    """``Writes.update`` alone. Returns how many rows it changed."""
    writes = Writes()
    writes.update(model, where, changes, key)
    return writes.do()


@lru_cache(maxsize=SHAPES_MAX)
def _alone(shape: _Shape) -> str:
    if isinstance(shape, _Insert):
        row = f"({', '.join(['%s'] * len(_inserted_fields(shape.model)))})"
        return f"{_into(shape.model)} VALUES {', '.join([row] * shape.rows)}"
    return _set(shape) if isinstance(shape, _Update) else shape


@lru_cache(maxsize=SHAPES_MAX)
def _together(shapes: tuple[_Shape, ...]) -> str:
    """One statement. Its result is one row: the number of rows that each write changed."""
    first, *others = shapes
    if_first = f"EXISTS (SELECT FROM {FIRST})"
    steps = [f"{FIRST} AS ({_alone(first)} RETURNING 1)"]
    for index, shape in enumerate(others, 1):
        if isinstance(shape, _Insert):
            # In this form PostgreSQL does not derive the types of the values from the columns.
            row = ", ".join(f"%s::{_type(field)}" for field in _inserted_fields(shape.model))
            rows = ", ".join([f"({row})"] * shape.rows)
            statement = f"{_into(shape.model)} SELECT * FROM (VALUES {rows}) _ WHERE {if_first}"  # noqa: S608
        else:
            statement = f"{_alone(shape)} AND {if_first}"
        steps.append(f"step_{index} AS ({statement} RETURNING 1)")
    names = [FIRST, *(f"step_{index}" for index in range(1, len(shapes)))]
    counts = ", ".join(f"(SELECT count(*) FROM {name})" for name in names)  # noqa: S608
    return f"WITH {', '.join(steps)} SELECT {counts}"


def _into(model: type[models.Model]) -> str:
    columns = ", ".join(_quoted(field) for field in _inserted_fields(model))
    return f"INSERT INTO {_table(model)} ({columns})"


def _set(shape: _Update) -> str:
    fields = _fields(shape.model)
    assignments = ", ".join(f"{_quoted(fields[name])} = %s" for name in shape.changes)
    conditions = " AND ".join(
        f"{_quoted(fields[name])} IS NULL" if name in shape.nulls else f"{_quoted(fields[name])} = %s"
        for name in shape.where
    )
    return f"UPDATE {_table(shape.model)} SET {assignments} WHERE {conditions}"  # noqa: S608


@cache
def _fields(model: type[models.Model]) -> dict[str, models.Field]:
    return {field.attname: field for field in model._meta.concrete_fields}


@cache
def _inserted_fields(model: type[models.Model]) -> list[models.Field]:
    return [field for field in model._meta.local_concrete_fields if not isinstance(field, models.AutoField)]


def _type(field: models.Field) -> str:
    """The column type without its length: a cast to a length cuts the value, where an INSERT would fail."""
    return re.sub(r"\(\d+\)", "", str(field.db_type(connections[DEFAULT_DB_ALIAS])))


def _table(model: type[models.Model]) -> str:
    return connections[DEFAULT_DB_ALIAS].ops.quote_name(model._meta.db_table)


def _quoted(field: models.Field) -> str:
    return connections[DEFAULT_DB_ALIAS].ops.quote_name(str(field.column))
