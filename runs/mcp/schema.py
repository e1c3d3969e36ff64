"""JSON Schemas of serializers: what a tool of the MCP endpoint takes is declared by its serializer alone."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from config.api.serializers import CreditsNumberField
from config.kernel import money

# The first class that a field is an instance of decides.
TYPES: tuple[tuple[type[serializers.Field], str], ...] = (
    (serializers.ChoiceField, "string"),
    (serializers.CharField, "string"),
    (serializers.IntegerField, "integer"),
    (serializers.FloatField, "number"),
    (CreditsNumberField, "number"),
    (serializers.BooleanField, "boolean"),
    (serializers.ListField, "array"),
)
# A field's attribute and the keyword of JSON Schema that says the same, by type.
LIMITS = {
    "string": (("min_length", "minLength"), ("max_length", "maxLength")),
    "array": (("min_length", "minItems"), ("max_length", "maxItems")),
    "integer": (("min_value", "minimum"), ("max_value", "maximum")),
    "number": (("min_value", "minimum"), ("max_value", "maximum")),
}


def input_schema(
    serializer: type[serializers.Serializer], variants: tuple[type[serializers.Serializer], ...] = ()
) -> dict[str, Any]:
    """The schema of a JSON object that ``serializer`` accepts; the fields of ``variants`` are optional in it."""
    fields = serializer().fields
    properties = {
        name: field_schema(field)
        for each in (*(variant().fields for variant in variants), fields)
        for name, field in each.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [name for name, field in fields.items() if field.required]
    return schema | ({"required": required} if required else {})


def field_schema(field: serializers.Field) -> dict[str, Any]:
    """Raises LookupError for a field of an unknown type, unless it has a ``json_schema`` of its own. The schema does
    not say that a field may be null.
    """
    if own := getattr(field, "json_schema", None):
        return own | {"description": str(field.help_text)}
    kind = next((name for known, name in TYPES if isinstance(field, known)), None)
    if kind is None:
        raise LookupError(f"{type(field).__name__} has no JSON Schema")
    schema: dict[str, Any] = {"type": kind}
    for attribute, keyword in LIMITS.get(kind, ()):
        if getattr(field, attribute, None) is not None:
            schema[keyword] = getattr(field, attribute)
    if isinstance(field, CreditsNumberField) and field.minimum is not None:
        schema["minimum"] = money.to_number(field.minimum)
    if isinstance(field, serializers.ChoiceField):
        schema["enum"] = list(field.choices)
    if isinstance(field, serializers.ListField):
        schema["items"] = field_schema(field.child)
    if field.default is not serializers.empty:
        schema["default"] = field.default
    return schema | ({"description": str(field.help_text)} if field.help_text else {})
