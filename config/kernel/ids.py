"""Identifiers (a type prefix and a ULID with 80 random bits), their model fields, and comparison with many of them."""

import json
from collections.abc import Iterable
from datetime import datetime
from functools import partial

from django.db import connection, models
from django.db.models.lookups import Lookup
from ulid import ULID

ID_LENGTH = 32


def new_id(prefix: str) -> str:
    """A new identifier, for example ``run_01kb5w3v2m8x4c9z6t7q0r1s2d``."""
    return f"{prefix}_{str(ULID()).lower()}"


def first_id(prefix: str, moment: datetime) -> str:
    """A text that sorts before every id that was created at ``moment`` or later."""
    return f"{prefix}_{str(ULID.from_datetime(moment))[:10].lower()}"


def is_plausible_id(key: str) -> bool:
    """Whether ``key`` can be an id. Other texts must not reach the database, where NUL causes an error."""
    return 0 < len(key) <= 64 and key.isascii() and key.replace("_", "").isalnum()


class _IdText(models.CharField):
    def db_type(self, connection) -> str:
        """Not ``varchar`` on PostgreSQL: Django would add a second index for LIKE to each index."""
        name = str(super().db_type(connection))
        return name.replace("varchar", "character varying") if connection.vendor == "postgresql" else name


class IdField(_IdText):
    """A primary key that ``new_id`` creates with this field's prefix."""

    def __init__(self, prefix: str = "", **kwargs) -> None:
        self.prefix = prefix
        self.own = {"max_length": ID_LENGTH, "primary_key": True, "editable": False, "default": partial(new_id, prefix)}
        super().__init__(**kwargs | self.own)

    def deconstruct(self):
        name, path, args, kwargs = super().deconstruct()
        others = {key: value for key, value in kwargs.items() if key not in self.own}
        return name, path, args, others | {"prefix": self.prefix}


def any_of() -> str:
    """SQL for "equals one of", with many values as one parameter from ``array``: one text and plan for any number."""
    return "= ANY(%s)" if connection.vendor == "postgresql" else "IN (SELECT value FROM json_each(%s))"


def array(values: Iterable[str]) -> list[str] | str:
    """The parameter for ``any_of``."""
    return list(values) if connection.vendor == "postgresql" else json.dumps(list(values))


@IdField.register_lookup
class AnyOf(Lookup):
    """The lookup ``pk__any_of=ids``: like ``pk__in``, with one parameter."""

    lookup_name = "any_of"
    prepare_rhs = False

    def as_sql(self, compiler, connection):
        sql, parameters = self.process_lhs(compiler, connection)
        return f"{sql} {any_of()}", [*parameters, array(self.rhs)]


class RefField(_IdText):
    """The id of a row whose model this app may not import (docs/architecture.md)."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**{"max_length": ID_LENGTH} | kwargs)
