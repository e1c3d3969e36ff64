"""The catalogue as clients see it, and the field of requests for a schema."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.api.serializers import CamelSerializer, CreditsNumberField
from runs.catalogue.output import check_output_schema

OUTPUT_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "object", "description": "The output is an object."}},
    "required": ["type"],
}


@extend_schema_field(OUTPUT_SCHEMA)
class OutputSchemaField(serializers.Field):
    json_schema: ClassVar[dict[str, Any]] = OUTPUT_SCHEMA

    def to_internal_value(self, data: Any) -> Any:
        try:
            check_output_schema(data)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None
        return data

    def to_representation(self, value: dict[str, Any]) -> dict[str, Any]:
        return value


class ModelSerializer(CamelSerializer):
    """Prices are credits per 1,000 tokens."""

    name = serializers.CharField(help_text="The name that requests use.")
    display_name = serializers.CharField(help_text="The name that people see.")
    provider = serializers.CharField(source="server.name", help_text="The provider of the model.")
    input_price = CreditsNumberField(source="price_in", help_text="Credits per 1,000 tokens of input.")
    output_price = CreditsNumberField(source="price_out", help_text="Credits per 1,000 tokens of output.")
    cached_input_price = CreditsNumberField(
        source="price_cached_in", help_text="Credits per 1,000 tokens of input that the provider reads from its cache."
    )
    context_tokens = serializers.IntegerField(min_value=1, help_text="The size of the model's window.")
    max_output_tokens = serializers.IntegerField(min_value=1, help_text="The most tokens of one answer.")
    is_default = serializers.BooleanField(help_text="Whether runs use this model when they name none.")


class ToolSerializer(CamelSerializer):
    """The price is the maximum number of credits for one call."""

    name = serializers.CharField(help_text="The name that requests use.")
    display_name = serializers.CharField(help_text="The name that people see.")
    description = serializers.CharField(help_text="What the tool does, as models are told.")
    node_type = serializers.CharField(help_text="The type of the tool: `builtin`, `http` or `mcp`.")
    input_schema = serializers.DictField(help_text="The JSON Schema of the arguments.")
    price = CreditsNumberField(help_text="The most that a call may cost, in credits.")
    approval = serializers.CharField(help_text="When a call needs an approval: `threshold`, `always` or `never`.")


class AgentSerializer(CamelSerializer):
    name = serializers.CharField(help_text="The name that requests use.")
    display_name = serializers.CharField(help_text="The name that people see.")
    description = serializers.CharField(help_text="What the agent does.")
    version = serializers.IntegerField(min_value=1, help_text="The version that a run gets which names none.")
    model = serializers.CharField(allow_null=True, help_text="The name of its model; null for the default one.")
    tools = serializers.ListField(
        child=serializers.CharField(), allow_null=True, help_text="The names of its tools; null for all."
    )
