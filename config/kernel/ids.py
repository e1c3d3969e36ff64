"""Identifiers: a type prefix and a ULID, so ids sort by the time they were made and can't be guessed (80 bits)."""

import json
from collections.abc import Iterable
from datetime import datetime

from django.db import connection, models
from django.db.models.lookups import Lookup
from ulid import ULID

ID_LENGTH = 32


def new_id(prefix: str) -> str:
    """A new identifier, as ``run_01kb5w3v2m8x4c9z6t7q0r1s2d``."""
    return f"{prefix}_{str(ULID()).lower()}"


def first_id(prefix: str, moment: datetime) -> str:
    """What sorts before every id that was made at ``moment`` or later."""
    return f"{prefix}_{str(ULID.from_datetime(moment))[:10].lower()}"


def is_plausible_id(key: str) -> bool:
    """False for what no id of ours can be, so it never reaches the database (NUL is an error there, not a miss)."""
    return 0 < len(key) <= 64 and key.isascii() and key.replace("_", "").isalnum()


class IdField(models.CharField):
    """A primary key made by ``new_id`` with this field's prefix."""

    def __init__(self, prefix: str = "", **kwargs) -> None:
        self.prefix = prefix
        kwargs["max_length"] = ID_LENGTH
        kwargs["primary_key"] = True
        kwargs["editable"] = False
        super().__init__(**kwargs)

    def get_default(self) -> str:
        return new_id(self.prefix)

    def has_default(self) -> bool:
        return True

    def deconstruct(self):
        name, path, args, kwargs = super().deconstruct()
        for key in ("max_length", "primary_key", "editable"):
            kwargs.pop(key, None)
        kwargs["prefix"] = self.prefix
        return name, path, args, kwargs


def any_of() -> str:
    """SQL: one of the values of one parameter, which ``array`` makes of them. However many there are, the statement's
    text stays the same, so that hundreds of ids need no parsing.
    """
    return "= ANY(%s)" if connection.vendor == "postgresql" else "IN (SELECT value FROM json_each(%s))"


def array(values: Iterable[str]) -> list[str] | str:
    return list(values) if connection.vendor == "postgresql" else json.dumps(list(values))


@IdField.register_lookup
class AnyOf(Lookup):
    """``pk__any_of=ids``: as ``pk__in``, in one parameter."""

    lookup_name = "any_of"
    prepare_rhs = False

    def as_sql(self, compiler, connection):
        sql, parameters = self.process_lhs(compiler, connection)
        return f"{sql} {any_of()}", [*parameters, array(self.rhs)]


class RefField(models.CharField):
    """The plain id of a row that this app may not import (see "who may import whom" in docs/architecture.md)."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("max_length", ID_LENGTH)
        super().__init__(**kwargs)
