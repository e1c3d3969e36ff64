"""Models, tools and agents as clients see them, and the schema of an output as clients send it."""

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.api.serializers import CamelSerializer, CreditsNumberField
from runs import catalogue
from runs.catalogue.rules import fits
from runs.tools.schema import check_output_schema, check_sent_schema

OUTPUT_TYPE = {"const": "object", "description": "The output is an object."}
OUTPUT_SCHEMA = {"type": "object", "properties": {"type": OUTPUT_TYPE}, "required": ["type"]}


@extend_schema_field({"type": "object", "additionalProperties": {}})
class SentSchemaField(serializers.DictField):
    """The JSON Schema of a tool's input, from a caller."""

    json_schema: ClassVar[dict[str, Any]] = {"type": "object"}
    default_validators = (fits(check_sent_schema),)
    default_error_messages: ClassVar = {"not_a_dict": "A JSON Schema of an object is required."}


@extend_schema_field(OUTPUT_SCHEMA)
class OutputSchemaField(SentSchemaField):
    json_schema: ClassVar[dict[str, Any]] = OUTPUT_SCHEMA
    default_validators = (fits(check_output_schema),)


class TypicalCreditsSerializer(CamelSerializer):
    """Half of the runs cost at most ``p50``, nine of ten at most ``p90``."""

    p50 = CreditsNumberField(help_text="What half of the runs cost at most, in credits.")
    p90 = CreditsNumberField(help_text="What nine of ten runs cost at most, in credits.")
    runs = serializers.IntegerField(min_value=20, help_text="The number of runs that were measured.")


class MeasuredSerializer(CamelSerializer):
    """Something of the catalogue, ``kind``, whose runs' costs are measured."""

    kind: ClassVar[str]
    typical_credits = serializers.SerializerMethodField(
        help_text="What a run usually costs: of the completed runs of the last 30 days, at most 10,000, measured each "
        "hour. Null below 20 runs."
    )

    @extend_schema_field(TypicalCreditsSerializer(allow_null=True))
    def get_typical_credits(self, item: Any) -> dict[str, Any] | None:
        found = catalogue.read().typical.get((self.kind, item.name))
        return TypicalCreditsSerializer(found).data if found else None


class ModelSerializer(MeasuredSerializer):
    """Prices are credits per 1,000 tokens."""

    kind = "model"
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
    node_type = serializers.CharField(help_text="The type of the tool: `builtin`, `http`, `mcp` or `client`.")
    input_schema = serializers.DictField(help_text="The JSON Schema of the arguments.")
    price = CreditsNumberField(help_text="The most that a call may cost, in credits.")
    approval = serializers.CharField(help_text="When a call needs an approval: `threshold`, `always` or `never`.")


class AgentSerializer(MeasuredSerializer):
    kind = "agent"
    name = serializers.CharField(help_text="The name that requests use.")
    display_name = serializers.CharField(source="agent.display_name", help_text="The name that people see.")
    description = serializers.CharField(source="agent.description", help_text="What the agent does.")
    version = serializers.IntegerField(
        source="number", min_value=1, help_text="The version that a run gets which names none."
    )
    model = serializers.CharField(allow_null=True, help_text="The name of its model; null for the default one.")
    tools = serializers.ListField(
        child=serializers.CharField(), allow_null=True, help_text="The names of its tools; null for all."
    )
