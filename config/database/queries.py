"""SQL that is compiled once: for the few statements that every request and every run makes.

Django builds a queryset's SQL each time, which takes longer than PostgreSQL takes to answer a read by primary key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connection, connections, models
from django.db.backends.signals import connection_created
from django.db.models import QuerySet
from django.db.models.base import ModelState
from django.dispatch import receiver
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format

M = TypeVar("M", bound=models.Model)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an argument goes."""

    index: int


@dataclass(frozen=True, slots=True)
class _Statement:
    sql: str
    # Constants, and where the arguments go.
    template: tuple[Any, ...]
    # Of the row's columns: names of the model's own fields, annotations, and what makes Python of a value.
    names: tuple[str, ...]
    annotations: tuple[tuple[str, int], ...]
    converters: tuple[tuple[int, Sequence[Callable[..., Any]], Any], ...]


class CompiledQuery(Generic[M]):
    """``build(*arguments)`` makes the queryset; ``kinds`` are the arguments' types, int or str.

    The arguments may only be values that the SQL compares, not what decides its shape. Relations are not followed and
    nothing is prefetched; annotations become attributes. The models' own ``__init__`` and its signals are left out.
    """

    def __init__(self, build: Callable[..., QuerySet[M]], *kinds: type[int] | type[str]) -> None:
        self.build, self.kinds = build, kinds
        self.model: type[M]
        self.statements: dict[str, _Statement] = {}

    def __call__(self, *arguments: int | str) -> list[M]:
        # Looked up once: each attribute of django.db.connection looks up the thread's connection.
        database = connections[DEFAULT_DB_ALIAS]
        statement = self.statements.get(database.vendor) or self._compile()
        parameters = [arguments[value.index] if isinstance(value, _Place) else value for value in statement.template]
        return [self._instance(statement, row, database) for row in _read(database, statement.sql, parameters)]

    def first(self, *arguments: int | str) -> M | None:
        return next(iter(self(*arguments)), None)

    def _instance(self, statement: _Statement, row: Sequence[Any], database: Any) -> M:
        if statement.converters:
            row = list(row)
            for index, converters, expression in statement.converters:
                for convert in converters:
                    row[index] = convert(row[index], expression, database)
        # As Model.from_db does it, but for the signals and the defaults that it weighs for each field.
        instance = self.model.__new__(self.model)
        vars(instance).update(zip(statement.names, row, strict=False), _state=_as_stored(database.alias))
        for name, index in statement.annotations:
            vars(instance)[name] = row[index]
        return instance

    def _compile(self) -> _Statement:
        # Values that no caller and no constant of a query has, so that their places in the parameters are found again.
        marks = [f"\x1f{index}\x1f" if kind is str else -2_147_000_001 - index for index, kind in enumerate(self.kinds)]
        queryset = self.build(*marks)
        compiler = queryset.query.get_compiler(connection=connection)
        sql, parameters = compiler.as_sql()
        template = tuple(_Place(marks.index(value)) if value in marks else value for value in parameters)
        if {value.index for value in template if isinstance(value, _Place)} != set(range(len(marks))):
            raise TypeError("every argument must be a value that the query compares")
        expressions = [column for column, _, _ in compiler.select or ()]
        own = [expressions[index].target.attname for index in (compiler.klass_info or {})["select_fields"]]
        converters = compiler.get_converters(expressions)
        self.model = queryset.model
        statement = _Statement(
            sql,
            template,
            names=tuple(own),
            annotations=tuple((compiler.annotation_col_map or {}).items()),
            converters=tuple((index, *found) for index, found in sorted(converters.items())),
        )
        self.statements[connection.vendor] = statement
        return statement


def _read(database: Any, sql: str, parameters: Sequence[Any]) -> list[Sequence[Any]]:
    """The rows. On a connection whose health is to be checked this read is the check, which would be a round trip of
    its own: it does no harm twice.
    """
    unchecked = database.health_check_enabled and not database.health_check_done
    if not unchecked or database.connection is None or database.in_atomic_block:
        return _fetch(database, sql, parameters)
    database.health_check_done = True
    try:
        return _fetch(database, sql, parameters)
    except (OperationalError, InterfaceError):
        if database.is_usable():
            raise
        database.close()
        return _fetch(database, sql, parameters)


def _fetch(database: Any, sql: str, parameters: Sequence[Any]) -> list[Sequence[Any]]:
    with database.cursor() as cursor:
        if database.vendor == "postgresql":
            # Moments are then read by psycopg's C code; as text Django has them parsed in Python.
            cursor.cursor.format = Format.BINARY
        cursor.execute(sql, parameters)
        rows: list[Sequence[Any]] = cursor.fetchall()
    return rows


def _as_stored(alias: str) -> ModelState:
    state = ModelState()
    state.db, state.adding = alias, False
    return state


class _JSONText(Loader):
    """Binary jsonb, as text behind a version byte, for the fields' own decoders: what Django has of textual jsonb."""

    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        return bytes(data[1:]).decode()


@receiver(connection_created)
def _read_binary_json_as_text(connection: Any, **kwargs: Any) -> None:
    if connection.vendor == "postgresql":
        connection.connection.adapters.register_loader("jsonb", _JSONText)
