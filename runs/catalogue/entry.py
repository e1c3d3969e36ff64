"""What the kinds of entries of the catalogue file have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from typing import Any, ClassVar

from django.db import models
from django.db.models import QuerySet
from rest_framework import serializers

from config.api.serializers import CamelSerializer, StrictBooleanField, StrictNumberField, camel
from config.kernel.jsontext import same_json
from runs.catalogue import yaml
from runs.catalogue.fields import LOST, VARIABLE, Address, Headers, Hidden, OneOf, Secret, Text, Whole, variables_of


class Variables:
    """The names of the variables that stand for secrets in an exported file, and what else its head says."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.notes: list[str] = []

    def noted(self, source: str) -> str:
        """The text, whose variables are named."""
        self.names = list(dict.fromkeys([*self.names, *variables_of(source)]))
        return source

    def new(self, *parts: str) -> str:
        base = "_".join(re.sub(r"[^A-Z0-9]+", "_", part.upper()).strip("_") for part in parts)
        name, number = base, 1
        while name in self.names:
            number += 1
            name = f"{base}_{number}"
        self.names.append(name)
        return f"${{{name}}}"


@dataclass(slots=True)
class Given:
    """An entry of the file: where it stands, and the columns that it sets. Without a path, no entry names the row."""

    path: yaml.Path
    values: dict[str, Any]


class Entry(CamelSerializer, serializers.ModelSerializer):
    """One row of the file. The validated value is its columns; a column that is kept is not among them."""

    serializer_field_mapping: ClassVar = {
        models.CharField: Text,
        models.TextField: Text,
        models.BooleanField: StrictBooleanField,
        models.PositiveIntegerField: Whole,
        models.FloatField: StrictNumberField,
    }
    serializer_choice_field = OneOf
    default_error_messages: ClassVar = {"invalid": "It must be a mapping."}
    # The columns of addresses that may have variables. Another column, ``…_source``, is for the file's own text of it.
    addresses: ClassVar[tuple[str, ...]] = ()
    # What precedes the name of a row in the names of variables.
    prefix: ClassVar[str] = ""
    # Without their secrets: perhaps no key decrypts one.
    queryset: QuerySet[Any]
    # Whether the file has a list of entries, or one without a name.
    is_list: ClassVar = True
    Meta: Any

    @cached_property
    def kept(self) -> set[str]:
        """The fields that stay as they are if the file leaves them out."""
        return {name for name, field in self.fields.items() if isinstance(field, Secret)} | {"isDefault"}

    def build_standard_field(self, field_name: str, model_field: Any) -> Any:
        """Without a query for other rows with the same name: those are changed."""
        built, kwargs = super().build_standard_field(field_name, model_field)
        return built, {name: value for name, value in kwargs.items() if name != "validators"}

    def rows(self) -> dict[str, Any]:
        return {row.name: row for row in self.queryset.order_by("name")}

    def blank(self, name: str, node_type: str) -> Any:
        """A new row, which has the default values."""
        return self.Meta.model()

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """The row as the file has it."""
        found: dict[str, Any] = serializers.ModelSerializer.to_representation(self, instance)
        for name, field in self.fields.items():
            if isinstance(field, Address) and (source := self.source_of(instance, str(field.source))):
                found[name] = Hidden([source, found[name]])
        return found

    def source_of(self, row: Any, column: str) -> str:
        """The text with variables of which an address was made; empty if there is none.

        The address may have been changed in the admin since. It still counts as made of that text if only the parts
        that were variables differ.
        """
        source: str = getattr(row, f"{column}_source")
        pattern = VARIABLE.sub(lambda found: "${" if found[1] is None else "*", escape(source))
        return source if source and fnmatchcase(getattr(row, column), pattern) else ""

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values, as in the file, of the fields that an entry may leave out."""
        name = given.get("name")
        shown = self.to_representation(self.blank(name if isinstance(name, str) else "", given.get("nodeType", "")))
        required = {name for name, field in self.fields.items() if field.required} | {"displayName"}
        return {
            name: value
            for name, value in shown.items()
            if name not in {*self.kept, "name", "nodeType"} and not (name in required and value in (None, ""))
        }

    def run_validation(self, data: Any = serializers.empty) -> Any:
        if not isinstance(data, Mapping):
            self.fail("invalid")
        given = {name: value for name, value in data.items() if value is not None or name in self.kept}
        values = super().run_validation(self.defaults(given) | given)
        for column in self.addresses:
            text = given.get(camel(column), "")
            values[f"{column}_source"] = text if variables_of(text) else ""
        return values

    def validate_name(self, name: str) -> str:
        if name != name.strip():
            raise serializers.ValidationError("It begins or ends with a blank.")
        return name

    def complete(self, entries: dict[str, Given], rows: dict[str, Any], wrong: Callable[..., None]) -> None:
        """Tell ``wrong`` the mistakes that an entry alone does not show, replace names of other rows by the rows, and
        add the changes that follow.
        """

    def store(self, row: Any, given: Given, is_new: bool, changed: Collection[str]) -> bool:
        """Store a row whose fields ``changed``; whether something is different now. Raises ValidationError."""
        row.save(force_insert=is_new)
        return True

    def written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        """The entry of an export."""
        shown, found = self.to_representation(row), dict[str, Any]()
        defaults = self.defaults(shown)
        for name, value in shown.items():
            if isinstance(value, Hidden):
                found[name] = self.placeholder(row, name, value, variables)
            elif value if name in self.kept else name not in defaults or not same_json(value, defaults[name]):
                found[name] = value
        return found

    def placeholder(self, row: Any, name: str, hidden: Hidden, variables: Variables) -> Any:
        field = self.fields[name]
        if isinstance(field, Address):
            return variables.noted(hidden.value[0])
        prefix = [self.prefix, row.name] if self.is_list else [self.prefix]
        if not isinstance(field, Headers):
            return variables.new(*prefix, str(field.source))
        if hidden is LOST:
            raise ValueError(f"No key of ENCRYPTION_KEYS decrypts the headers of {self.prefix.lower()}s.{row.name}.")
        return {header: variables.new(*prefix, "HEADER", header) for header in hidden.value}
