"""Queries whose SQL is compiled once. Django compiles a queryset at each evaluation, which takes longer than a read by
primary key. They are for the few statements of every request and run: ``benchmarks/queries.py`` must show what a query
saves here (docs/decisions/0008).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connection, connections, models
from django.db.models import QuerySet
from django.db.models.base import ModelState

M = TypeVar("M", bound=models.Model)
WIDE = {"smallint": "bigint", "integer": "bigint"}


@dataclass(frozen=True, slots=True)
class _Statement(Generic[M]):
    model: type[M]
    sql: str
    # The parameters: each is the index of an argument, or, if that is None, a constant.
    template: tuple[tuple[int | None, Any], ...]
    # The names of a row's columns, as far as they are kept, and the conversions of values.
    names: tuple[str, ...]
    conversions: tuple[tuple[int, Any, Callable[..., Any]], ...]


class CompiledQuery(Generic[M]):
    """``build(*arguments)`` returns the queryset. ``kinds`` are the types of the arguments, which must be values that
    the SQL compares. ``select_related`` and ``prefetch_related`` have no effect, annotations become attributes, and
    instances are made without the model's ``__init__`` and signals.
    """

    def __init__(self, build: Callable[..., QuerySet[M]], *kinds: type[int] | type[str]) -> None:
        self.build, self.kinds = build, kinds

    def __call__(self, *arguments: int | str) -> list[M]:
        statement, database = self._statement, connections[DEFAULT_DB_ALIAS]
        parameters = [value if index is None else arguments[index] for index, value in statement.template]
        return [self._instance(statement, row, database) for row in read(statement.sql, parameters)]

    def first(self, *arguments: int | str) -> M | None:
        return next(iter(self(*arguments)), None)

    def _instance(self, statement: _Statement[M], row: Sequence[Any], database: Any) -> M:
        values = list(row)
        for index, expression, convert in statement.conversions:
            values[index] = convert(values[index], expression, database)
        # Like Model.from_db, without signals and without the check of each field for a default.
        instance, state = statement.model.__new__(statement.model), ModelState()
        state.db, state.adding = database.alias, False
        vars(instance).update(zip(statement.names, values, strict=False), _state=state)
        return instance

    @cached_property
    def _statement(self) -> _Statement[M]:
        # Values that no query has as a constant, to find the positions of the arguments in the parameters.
        marks = [f"\x1f{index}\x1f" if kind is str else -2_147_000_001 - index for index, kind in enumerate(self.kinds)]
        queryset = self.build(*marks)
        compiler = queryset.query.get_compiler(connection=connection)
        sql, parameters = compiler.as_sql()
        template = tuple((marks.index(value), None) if value in marks else (None, value) for value in parameters)
        if {index for index, _ in template if index is not None} != set(range(len(marks))):
            raise TypeError("every argument must be a value that the query compares")
        expressions = [column for column, _, _ in compiler.select or ()]
        # Django selects the model's own fields, then annotations, and then the fields of related models.
        own = [expressions[index].target.attname for index in (compiler.klass_info or {})["select_fields"]]
        names = (*own, *(compiler.annotation_col_map or ()))
        converters = compiler.get_converters(expressions)
        if connection.vendor == "postgresql":
            sql = _with_fixed_types(sql, [expression.output_field.db_type(connection) for expression in expressions])
        conversions = tuple((index, by, convert) for index, (found, by) in converters.items() for convert in found)
        return _Statement(queryset.model, sql, template, names, conversions)


def _with_fixed_types(sql: str, types: Sequence[str]) -> str:
    """The query with column types that no migration changes: prepared queries get a new plan then, and not an error."""
    names = [f"c{index}" for index in range(len(types))]
    wide = [WIDE.get(name, name) for name in (re.sub(r"\(.*\)", "", kind) for kind in types)]
    columns = ", ".join(f"{name}::{kind}" for name, kind in zip(names, wide, strict=True))
    return f"SELECT {columns} FROM ({sql}) AS read({', '.join(names)})"  # noqa: S608


def read(sql: str, parameters: Sequence[Any]) -> list[Sequence[Any]]:
    """The rows of a query, which is prepared. In a query that is written as SQL, each column must be cast to a type
    that no migration changes. Outside of a transaction, a lost connection is replaced once and the read repeated,
    which is safe. So the round trip of Django's check of the connection is not needed.
    """
    # Looked up once: each attribute of django.db.connection looks up the thread's connection.
    database: Any = connections[DEFAULT_DB_ALIAS]
    if not database.in_atomic_block:
        database.health_check_done = True
        try:
            return _fetch(database, sql, parameters)
        except (OperationalError, InterfaceError):
            if database.connection is None or database.is_usable():
                raise
            database.close()
    return _fetch(database, sql, parameters)


def _fetch(database: Any, sql: str, parameters: Sequence[Any]) -> list[Sequence[Any]]:
    with database.cursor() as cursor:
        if database.vendor == "postgresql":
            cursor.cursor.stable = True
        cursor.execute(sql, parameters)
        return cursor.fetchall()
