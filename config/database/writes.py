"""Plain INSERTs and UPDATEs whose SQL is compiled once, and groups of them as one statement.

The number of statements in a transaction decides its cost, in this process and in the database, and how long it holds
its locks. PostgreSQL therefore executes a whole group as one statement. SQLite, which needs no round trip, executes the
group one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, connections, models, transaction

from config.database.protected import Key, require_key


class _Insert(NamedTuple):
    model: type[models.Model]
    columns: tuple[str, ...]
    rows: int


class _Update(NamedTuple):
    model: type[models.Model]
    changes: tuple[str, ...]
    where: tuple[str, ...]
    nulls: tuple[str, ...]


class _Lock(NamedTuple):
    model: type[models.Model]
    where: tuple[str, ...]
    nulls: tuple[str, ...]


# The part of a statement that its SQL depends on; the values are the rest.
_Shape = _Insert | _Update | _Lock | str
FIRST = "first"
# Compiled statements that are kept of each kind. The number of inserted rows is part of a shape, and a model decides
# it, so there is no end of shapes; those of a process's usual work are few.
SHAPES_MAX = 256


class Writes:
    """Writes that happen together, inside the caller's transaction. The first ``guards`` of them happen in their order,
    each only if the one before it found a row; all others only if the last guard did. The callers see to it that a
    guard which changes a row is not followed by one that may find none.

    No write sees what the others write, and no two may write the same row.
    """

    def __init__(self) -> None:
        self.guards = 1
        self.shapes: list[_Shape] = []
        self.values: list[list[Any]] = []
        self.inserted: list[models.Model] = []
        self.listeners: list[tuple[int, Callable[[], None]]] = []

    def insert(self, *rows: models.Model) -> None:
        """INSERT rows of one model as they are: the database defaults of their columns are not applied.

        For models whose primary key is known before the INSERT, or not needed after it.
        """
        if rows:
            db, model = connections[DEFAULT_DB_ALIAS], type(rows[0])
            # A column that is NULL in all rows is left out: psycopg parses a statement of more than 50 parameters at
            # each execution.
            fields = [
                field
                for field, is_optional in _inserted_fields(model)
                if not is_optional or any(getattr(row, field.attname) is not None for row in rows)
            ]
            values = [field.get_db_prep_save(getattr(row, field.attname), db) for row in rows for field in fields]
            self._add(_Insert(model, tuple(field.attname for field in fields), len(rows)), values)
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
        values = [fields[name].get_db_prep_save(value, db) for name, value in changes.items()]
        nulls, found = _found(model, where)
        self._add(_Update(model, tuple(changes), tuple(where), nulls), values + found)

    def lock(self, model: type[models.Model], where: Mapping[str, Any]) -> None:
        """Lock the rows whose fields have the values of ``where``, as an UPDATE does. For guards."""
        nulls, found = _found(model, where)
        self._add(_Lock(model, tuple(where), nulls), found)

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

    @staticmethod
    def are_one_statement() -> bool:
        """Whether the database executes them as one statement, which needs no transaction around it."""
        return connections[DEFAULT_DB_ALIAS].vendor == "postgresql"

    @classmethod
    def transaction(cls) -> AbstractContextManager[Any]:
        """A transaction for writes that are the only ones in it: the statement itself, if they are one."""
        return nullcontext() if cls.are_one_statement() else transaction.atomic()

    def do(self) -> int:
        """Execute all writes. Returns how many rows the last guard found."""
        changed = self._at_once() if self.are_one_statement() else self._in_steps()
        if found := changed[self.guards - 1]:
            for row in self.inserted:
                row._state.adding, row._state.db = False, DEFAULT_DB_ALIAS
            for index, then in self.listeners:
                if changed[index]:
                    then()
        return found

    def _add(self, shape: _Shape, values: list[Any]) -> None:
        self.shapes.append(shape)
        self.values.append(values)

    def _in_steps(self) -> list[int]:
        changed: list[int] = []
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            for shape, values in zip(self.shapes, self.values, strict=True):
                cursor.execute(_alone(shape), values)
                changed.append(len(cursor.fetchall()) if isinstance(shape, _Lock) else int(cursor.rowcount))
                if not changed[: self.guards][-1]:
                    break
        return changed + [0] * (len(self.shapes) - len(changed))

    def _at_once(self) -> list[int]:
        database: Any = connections[DEFAULT_DB_ALIAS]
        with database.raw_cursor() as cursor:  # the results are counts
            cursor.execute(_numbered(tuple(self.shapes), self.guards), list(chain.from_iterable(self.values)))
            return list(cursor.fetchone()) if len(self.shapes) > 1 else [int(cursor.rowcount)]


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
        row = f"({', '.join(['%s'] * len(shape.columns))})"
        return f"{_into(shape)} VALUES {', '.join([row] * shape.rows)}"
    if isinstance(shape, _Lock):
        return f"SELECT 1 FROM {_table(shape.model)} WHERE {_conditions(shape)}"  # noqa: S608
    return _set(shape) if isinstance(shape, _Update) else shape


@lru_cache(maxsize=SHAPES_MAX)
def _numbered(shapes: tuple[_Shape, ...], guards: int) -> str:
    """The statement of ``shapes`` with PostgreSQL's placeholders."""
    first, *others = (_together(shapes, guards) if len(shapes) > 1 else _alone(shapes[0])).split("%s")
    return "".join([first, *(f"${number}{text}" for number, text in enumerate(others, 1))])


def _together(shapes: tuple[_Shape, ...], guards: int) -> str:
    """One statement. Its result is one row: the number of rows that each write changed."""
    names = [FIRST, *(f"step_{index}" for index in range(1, len(shapes)))]
    steps: list[str] = []
    for index, shape in enumerate(shapes):
        statement = _guarded(shape, names[min(index, guards) - 1]) if index else _alone(shape)
        end = "FOR NO KEY UPDATE" if isinstance(shape, _Lock) else "RETURNING 1"
        steps.append(f"{names[index]} AS ({statement} {end})")
    counts = ", ".join(f"(SELECT count(*) FROM {name})" for name in names)  # noqa: S608
    return f"WITH {', '.join(steps)} SELECT {counts}"


def _guarded(shape: _Shape, guard: str) -> str:
    condition = f"EXISTS (SELECT FROM {guard})"
    if not isinstance(shape, _Insert):
        return f"{_alone(shape)} AND {condition}"
    # In this form PostgreSQL does not derive the types of the values from the columns.
    row = ", ".join(f"%s::{_type(_fields(shape.model)[name])}" for name in shape.columns)
    rows = ", ".join([f"({row})"] * shape.rows)
    return f"{_into(shape)} SELECT * FROM (VALUES {rows}) _ WHERE {condition}"  # noqa: S608


def _into(shape: _Insert) -> str:
    columns = ", ".join(_quoted(_fields(shape.model)[name]) for name in shape.columns)
    return f"INSERT INTO {_table(shape.model)} ({columns})"


def _set(shape: _Update) -> str:
    fields = _fields(shape.model)
    assignments = ", ".join(f"{_quoted(fields[name])} = %s" for name in shape.changes)
    return f"UPDATE {_table(shape.model)} SET {assignments} WHERE {_conditions(shape)}"  # noqa: S608


def _conditions(shape: _Update | _Lock) -> str:
    fields = _fields(shape.model)
    return " AND ".join(
        f"{_quoted(fields[name])} IS NULL" if name in shape.nulls else f"{_quoted(fields[name])} = %s"
        for name in shape.where
    )


def _found(model: type[models.Model], where: Mapping[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """The names of ``where`` that are None, and the values of the others."""
    db, fields = connections[DEFAULT_DB_ALIAS], _fields(model)
    nulls = tuple(name for name, value in where.items() if value is None)
    return nulls, [fields[name].get_db_prep_value(value, db) for name, value in where.items() if value is not None]


@cache
def _fields(model: type[models.Model]) -> dict[str, models.Field]:
    return {field.attname: field for field in model._meta.concrete_fields}


@cache
def _inserted_fields(model: type[models.Model]) -> list[tuple[models.Field, bool]]:
    """The fields, each with whether a column that is left out of an INSERT is NULL."""
    fields = [field for field in model._meta.local_concrete_fields if not isinstance(field, models.AutoField)]
    return [(field, field.null and not field.has_db_default()) for field in fields]


def _type(field: models.Field) -> str:
    """The column type without its length: a cast to a length cuts the value, where an INSERT would fail."""
    return re.sub(r"\(\d+\)", "", str(field.db_type(connections[DEFAULT_DB_ALIAS])))


def _table(model: type[models.Model]) -> str:
    return connections[DEFAULT_DB_ALIAS].ops.quote_name(model._meta.db_table)


def _quoted(field: models.Field) -> str:
    return connections[DEFAULT_DB_ALIAS].ops.quote_name(str(field.column))
