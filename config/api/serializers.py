"""camelCase serializers: field names are mapped one by one, so the keys of free-form objects pass through untouched."""

import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Self

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.kernel import clock, money
from config.kernel.jsontext import INTEGER_MAX

# How many unknown fields an error names, and how much of each name.
UNKNOWN_SHOWN_MAX, UNKNOWN_NAME_CHARS = 20, 100


def camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)


class CamelSerializer(serializers.Serializer):
    """A serializer whose fields are declared in snake_case and appear in camelCase."""

    # For a part of a body: fields of other parts are not errors.
    ignores_unknown: ClassVar[bool] = False

    def get_fields(self) -> dict[str, serializers.Field]:
        fields = {}
        for name, field in super().get_fields().items():
            public = camel(name)
            if isinstance(field, serializers.SerializerMethodField):
                field.method_name = field.method_name or f"get_{name}"
            elif public != name and field.source is None:
                field.source = name
            fields[public] = field
        return fields

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """As in DRF, but the fields are copied and bound once per class, not once per object."""
        shown: dict[str, Any] = {}
        for name, field in self._reader().fields.items():
            if isinstance(field, serializers.SerializerMethodField):  # the method may use this serializer's context
                shown[name] = getattr(self, str(field.method_name))(instance)
                continue
            try:
                value = field.get_attribute(instance)
            except serializers.SkipField:
                continue
            shown[name] = None if value is None else field.to_representation(value)
        return shown

    @classmethod
    def validated(cls, data: Any) -> dict[str, Any]:
        """The validated ``data``. Raises ValidationError with every field's messages, unknown fields included."""
        reader = cls._reader()
        unknown = {} if cls.ignores_unknown or not isinstance(data, Mapping) else unknown_fields(data, reader.fields)
        try:
            result: dict[str, Any] = reader.run_validation(data)
        except serializers.ValidationError as error:
            if unknown and isinstance(error.detail, dict):
                raise serializers.ValidationError({**error.detail, **unknown}) from None
            raise
        if unknown:
            raise serializers.ValidationError(unknown)
        return result

    @classmethod
    @cache
    def _reader(cls) -> Self:
        """One instance per class, because DRF copies and binds all fields for each."""
        return cls()


class NoInput(CamelSerializer):
    """The body of an operation that takes none: empty, or an empty object."""


def unknown_fields(data: Mapping[str, Any], known: Collection[str]) -> dict[str, list[str]]:
    """Messages for the names in ``data`` that are not ``known``, with the name that was probably meant."""
    found = {}
    for name in islice((name for name in data if name not in known), UNKNOWN_SHOWN_MAX):
        found[name[:UNKNOWN_NAME_CHARS]] = ["Unknown field.", *did_you_mean(name, known)]
    return found


def did_you_mean(name: str, known: Collection[str]) -> list[str]:
    """A message with the name that was probably meant, if there is one."""
    meant = get_close_matches(name, known, n=1) if len(name) <= UNKNOWN_NAME_CHARS else []
    return [f"Did you mean {best}?" for best in meant]


@extend_schema_field({"type": "string", "format": "date-time"})
class TimestampField(serializers.ReadOnlyField):
    """ISO 8601, UTC, milliseconds, ``Z``."""

    def to_representation(self, value: Any) -> str:
        return clock.iso(value) or ""  # never called with null


@extend_schema_field({})
class AnyField(serializers.Field):
    """Any JSON value, as it came."""

    def validate_empty_values(self, data: Any) -> tuple[bool, Any]:
        """Null is a value here. ``allow_null`` would make the OpenAPI document list it a second time."""
        return (False, None) if data is None else super().validate_empty_values(data)

    def to_internal_value(self, data: Any) -> Any:
        return data


class CreditsNumberField(serializers.Field):
    """Micro-credits inside, an exact JSON number outside. For input, ``minimum`` is in micro-credits."""

    def __init__(self, *, minimum: int | None = None, **kwargs: Any) -> None:
        self.minimum = minimum
        super().__init__(**kwargs)

    def to_representation(self, value: int) -> Any:
        return money.to_number(value)

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, str):
            raise serializers.ValidationError("A number is required.")
        try:
            return money.parse(data, minimum=self.minimum, field="The number")
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None


@extend_schema_field({"type": "string", "pattern": r"^-?\d+(\.\d{1,6})?$", "examples": ["12.5"]})
class CreditsTextField(serializers.ReadOnlyField):
    """Micro-credits inside, a plain decimal string outside."""

    def to_representation(self, value: int) -> str:
        return money.to_text(value)


def NullableText(help_text: str) -> serializers.CharField:
    return serializers.CharField(allow_null=True, help_text=help_text)


class StrictCharField(serializers.CharField):
    """A JSON string only; DRF would also accept a number. ``pattern`` is for the OpenAPI document alone."""

    pattern: str | None = None

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class BoundedListField(serializers.ListField):
    """A list whose length is checked first: DRF would make an error for each of a million wrong items."""

    def to_internal_value(self, data: Any) -> list[Any]:
        if isinstance(data, list) and self.max_length is not None and len(data) > self.max_length:
            raise serializers.ValidationError(f"Ensure this field has no more than {self.max_length} elements.")
        return super().to_internal_value(data)


class StrictIntegerField(serializers.IntegerField):
    """A whole JSON number (``30`` or ``30.0``): no text, boolean or fraction."""

    def to_internal_value(self, data: Any) -> int:
        is_number = isinstance(data, (int, Decimal)) and not isinstance(data, bool)
        if not is_number or abs(data) >= INTEGER_MAX or data != int(data):
            self.fail("invalid")
        return int(data)


class StrictNumberField(serializers.FloatField):
    """A JSON number: no text, no boolean."""

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, float, Decimal)):
            self.fail("invalid")
        return super().to_internal_value(float(data))


class StrictBooleanField(serializers.BooleanField):
    """``true`` or ``false``: no text or number."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data
