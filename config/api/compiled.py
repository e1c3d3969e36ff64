"""Querysets that are compiled once: for the few reads that every request makes.

Django builds a queryset's SQL anew each time, which takes longer than PostgreSQL takes to answer a read by primary key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from django.db import connection, models
from django.db.models import QuerySet

M = TypeVar("M", bound=models.Model)


class CompiledQuery(Generic[M]):
    """``build(*arguments)`` makes the queryset; ``kinds`` are the arguments' types, int or str.

    The arguments may only be values that the SQL compares, not what decides its shape. Relations are not followed and
    nothing is prefetched; annotations become attributes.
    """

    def __init__(self, build: Callable[..., QuerySet[M]], *kinds: type[int] | type[str]) -> None:
        self.build, self.kinds = build, kinds
        self.statements: dict[str, tuple[type[M], str, tuple[Any, ...]]] = {}

    def __call__(self, *arguments: int | str) -> list[M]:
        vendor = connection.vendor
        if vendor not in self.statements:
            self.statements[vendor] = self._compile()
        model, sql, template = self.statements[vendor]
        parameters = [arguments[value.index] if isinstance(value, _Place) else value for value in template]
        return list(model._default_manager.raw(sql, parameters))

    def first(self, *arguments: int | str) -> M | None:
        return next(iter(self(*arguments)), None)

    def _compile(self) -> tuple[type[M], str, tuple[Any, ...]]:
        # Values that no caller and no constant of a query has, so that their places in the parameters are found again.
        marks = [f"\x1f{index}\x1f" if kind is str else -7_331_000_001 - index for index, kind in enumerate(self.kinds)]
        queryset = self.build(*marks)
        sql, parameters = queryset.query.sql_with_params()
        template = tuple(_Place(marks.index(value)) if value in marks else value for value in parameters)
        if {value.index for value in template if isinstance(value, _Place)} != set(range(len(marks))):
            raise TypeError("every argument must be a value that the query compares")
        return queryset.model, sql, template


class _Place:
    """Where an argument goes."""

    def __init__(self, index: int) -> None:
        self.index = index
