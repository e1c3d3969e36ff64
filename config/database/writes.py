"""Plain INSERTs and UPDATEs whose SQL is compiled once. PostgreSQL executes a group of them as one statement, because
the number of statements decides how long a transaction holds its locks; SQLite executes them one by one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Self

from django.db import DEFAULT_DB_ALIAS, connections, models

from config.database.protected import Key, require_key

Values = Mapping[str, Any]
# Compiled statements that are kept of each kind. Their number is not bounded: models decide how many rows are inserted.
STATEMENTS_MAX = 256


class Writes:
    """Writes that happen together, inside the caller's transaction. The first ``guards`` of them happen in order, each
    only if the one before found a row; all others only if the last guard did. A guard that changes a row must not be
    followed by one that may find none. No write sees the others' changes, and no two may write the same row.
    """

    def __init__(self) -> None:
        self.guards = 1
        # The SQL, its values, and what is called if it changed a row.
        self.statements: list[tuple[str, Sequence[Any], Callable[[], None] | None]] = []
        self.inserted: list[models.Model] = []

    def insert(self, *rows: models.Model) -> Self:
        """INSERT rows of one model, without the database defaults of their columns and without reading their keys."""
        if rows:
            db, model = connections[DEFAULT_DB_ALIAS], type(rows[0])
            fields = _inserted_fields(model)
            values = [field.get_db_prep_save(getattr(row, field.attname), db) for row in rows for field in fields]
            self.execute(_insert(model, len(rows)), values)
            self.inserted += rows
        return self

    def update(self, model: type[models.Model], where: Values, changes: Values, key: Key | None = None) -> Self:
        """UPDATE the rows whose fields have the values of ``where``, which may be None. Fields are named by attribute
        (``chat_id``), values are no expressions, and protected fields change only with the model's ``key``.
        """
        require_key(model, changes, key)
        db = connections[DEFAULT_DB_ALIAS]
        fields: list[Any] = [model._meta.get_field(name) for name in changes]
        assignments = ", ".join(f'"{field.column}" = %s' for field in fields)
        values = [field.get_db_prep_save(value, db) for field, value in zip(fields, changes.values(), strict=True)]
        conditions, known = _conditions(model, where)
        self.execute(f'UPDATE "{model._meta.db_table}" SET {assignments} WHERE {conditions}', values + known)  # noqa: S608
        return self

    def lock(self, model: type[models.Model], where: Values) -> None:
        """Lock the rows whose fields have the values of ``where``, as an UPDATE does. For guards."""
        conditions, known = _conditions(model, where)
        self.execute(f'SELECT 1 FROM "{model._meta.db_table}" WHERE {conditions}', known)  # noqa: S608

    def execute(self, sql: str, values: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        """Add any INSERT or UPDATE that ends with its WHERE clause. ``then`` is called if it changed a row."""
        self.statements.append((sql, values, then))

    def include(self, others: Self) -> None:
        self.statements += others.statements
        self.inserted += others.inserted

    @staticmethod
    def are_one_statement() -> bool:
        """Whether the database executes them as one statement, which needs no transaction around it."""
        return connections[DEFAULT_DB_ALIAS].vendor == "postgresql"

    def do(self) -> int:
        """Execute all writes. Returns how many rows the last guard found."""
        changed = self._at_once() if self.are_one_statement() else self._in_steps()
        if found := changed[self.guards - 1]:
            for row in self.inserted:
                row._state.adding, row._state.db = False, DEFAULT_DB_ALIAS
            for count, (_, _, then) in zip(changed, self.statements, strict=True):
                if count and then is not None:
                    then()
        return found

    def _in_steps(self) -> list[int]:
        changed = [0] * len(self.statements)
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            for index, (sql, values, _) in enumerate(self.statements):
                cursor.execute(sql, values)
                changed[index] = len(cursor.fetchall()) if _is_lock(sql) else int(cursor.rowcount)
                if index < self.guards and not changed[index]:
                    break
        return changed

    def _at_once(self) -> list[int]:
        database: Any = connections[DEFAULT_DB_ALIAS]
        with database.raw_cursor() as cursor:  # the results are counts
            sql = _numbered(tuple(sql for sql, _, _ in self.statements), self.guards)
            cursor.execute(sql, [value for _, values, _ in self.statements for value in values])
            return list(cursor.fetchone()) if len(self.statements) > 1 else [int(cursor.rowcount)]


@lru_cache(maxsize=STATEMENTS_MAX)
def _insert(model: type[models.Model], rows: int) -> str:
    fields = _inserted_fields(model)
    columns = ", ".join(f'"{field.column}"' for field in fields)
    # In this form, PostgreSQL does not derive the types of the values from the columns.
    row = f"({', '.join(f'%s{_cast(field)}' for field in fields)})"
    values = ", ".join([row] * rows)
    table = model._meta.db_table
    return f'INSERT INTO "{table}" ({columns}) SELECT * FROM (VALUES {values}) _ WHERE true'  # noqa: S608


def _is_lock(sql: str) -> bool:
    return sql.startswith("SELECT")


@lru_cache(maxsize=STATEMENTS_MAX)
def _numbered(statements: tuple[str, ...], guards: int) -> str:
    """All statements as one, with PostgreSQL's placeholders. If there are several, the result is the count of each."""
    text, names = statements[0], [f"step_{index}" for index in range(len(statements))]
    if len(statements) > 1:
        steps = []
        for index, sql in enumerate(statements):
            condition = f" AND EXISTS (SELECT FROM {names[min(index, guards) - 1]})" if index else ""
            end = "FOR NO KEY UPDATE" if _is_lock(sql) else "RETURNING 1"
            steps.append(f"{names[index]} AS ({sql}{condition} {end})")
        counts = ", ".join(f"(SELECT count(*) FROM {name})" for name in names)  # noqa: S608
        text = f"WITH {', '.join(steps)} SELECT {counts}"
    first, *others = text.split("%s")
    return "".join([first, *(f"${number}{part}" for number, part in enumerate(others, 1))])


def _conditions(model: type[models.Model], where: Values) -> tuple[str, list[Any]]:
    """SQL for "the fields have these values", and its parameters."""
    db = connections[DEFAULT_DB_ALIAS]
    fields: list[tuple[Any, Any]] = [(model._meta.get_field(name), value) for name, value in where.items()]
    tests = (f'"{field.column}" {"IS NULL" if value is None else "= %s"}' for field, value in fields)
    return " AND ".join(tests), [field.get_db_prep_value(value, db) for field, value in fields if value is not None]


@cache
def _inserted_fields(model: type[models.Model]) -> list[models.Field]:
    return [field for field in model._meta.local_concrete_fields if not isinstance(field, models.AutoField)]


def _cast(field: models.Field) -> str:
    """A cast to the column's type without its length: a cast to a length cuts the value, where an INSERT would fail."""
    db = connections[DEFAULT_DB_ALIAS]
    return re.sub(r"\(\d+\)", "", f"::{field.db_type(db)}") if db.vendor == "postgresql" else ""
