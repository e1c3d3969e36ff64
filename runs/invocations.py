"""Tool calls as clients see them, and what clients send of their own tools."""

from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.api.serializers import (
    AnyField,
    BoundedListField,
    CamelSerializer,
    CreditsNumberField,
    StrictCharField,
    TimestampField,
    unknown_fields,
)
from runs.catalogue.serializers import SentSchemaField
from runs.models import Awaiting, InvocationStatus
from runs.tools.base import shown_result

# Of a run's `clientTools`.
CLIENT_TOOLS_MAX = 32
CLIENT_TOOL_DESCRIPTION_MAX_CHARS = 2000


class ProgressSerializer(CamelSerializer):
    fraction = serializers.FloatField(min_value=0, max_value=1, allow_null=True, help_text="How much is done.")
    message = serializers.CharField(allow_null=True, help_text="What is being done.")
    at = TimestampField(help_text="When the tool said so.")


class ToolInvocationSerializer(CamelSerializer):
    """Needs a call of ``services.runs_of``."""

    id = serializers.CharField()
    agent_run_id = serializers.CharField(source="run_id", help_text="The run that made the call.")
    turn_index = serializers.IntegerField(min_value=1, help_text="The model turn that made the call, from 1.")
    call_index = serializers.IntegerField(min_value=1, help_text="The position of the call within its turn, from 1.")
    tool_call_id = serializers.CharField(help_text="The id that the model gave the call.")
    name = serializers.CharField(help_text="The name of the tool.")
    node_type = serializers.CharField(help_text="The type of the tool: `builtin`, `http`, `mcp` or `client`.")
    input = serializers.DictField(help_text="The arguments as the model gave them.")
    status = serializers.ChoiceField(
        choices=InvocationStatus.values,
        help_text="`PENDING`, `DISPATCHING`, then `COMPLETED` or `FAILED`; `REFUSED` or `CANCELLED` without a call.",
    )
    awaiting = serializers.ChoiceField(
        choices=Awaiting.values,
        allow_null=True,
        help_text="Who gives the outcome of an open call that takes long: the `tool`, or the caller's app (`client`).",
    )
    expires_at = TimestampField(allow_null=True, help_text="Until when the call awaits its outcome, or null.")
    progress = serializers.SerializerMethodField(help_text="The last progress of a call that awaits its outcome.")
    credit_estimate = CreditsNumberField(help_text="The most that the call may cost, in credits.")
    credit_used = CreditsNumberField(help_text="What the call cost, in credits; 0 unless it is completed.")
    result = serializers.SerializerMethodField(
        help_text="The first 8 KiB of the text that the model received; null unless the call is completed."
    )
    result_truncated = serializers.SerializerMethodField(help_text="Whether `result` is only the beginning.")
    result_urls = serializers.ListField(
        child=serializers.CharField(), help_text="Files and pages that the tool created."
    )
    error_code = serializers.CharField(allow_null=True, help_text="Why the call failed, for programs; otherwise null.")
    error_message = serializers.CharField(allow_null=True, help_text="Why the call failed, for people; otherwise null.")
    started_at = TimestampField(allow_null=True, help_text="When the call was made, or null.")
    finished_at = TimestampField(allow_null=True, help_text="When the call ended, or null.")
    duration_ms = serializers.IntegerField(
        allow_null=True, help_text="How long the call took, in milliseconds, or null."
    )
    created_at = TimestampField()
    updated_at = TimestampField()

    @extend_schema_field(ProgressSerializer(allow_null=True))
    def get_progress(self, call: Any) -> dict[str, Any] | None:
        return call.progress if call.awaiting else None

    def get_result(self, call: Any) -> str | None:
        if call.status != InvocationStatus.COMPLETED:
            return None
        return shown_result(call.result_start, call.result_urls)[0]

    def get_result_truncated(self, call: Any) -> bool:
        return shown_result(call.result_start, call.result_urls)[1]


# What an API key without the scope runs:read sees of a call: no text.
INVOCATION_STATE = {
    *("id", "agentRunId", "turnIndex", "callIndex", "name", "nodeType", "status", "awaiting", "expiresAt"),
    *("creditEstimate", "creditUsed", "errorCode", "startedAt", "finishedAt", "durationMs", "createdAt", "updatedAt"),
}


def invocation_without_text(call: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"input": {}, "resultUrls": [], "resultTruncated": False, "toolCallId": ""}
    return {name: value if name in INVOCATION_STATE else empty.get(name) for name, value in call.items()}


class ClientToolInput(CamelSerializer):
    name = StrictCharField(
        trim_whitespace=False,
        validators=[RegexValidator(r"\A[A-Za-z0-9_-]{1,64}\Z", "Use 1 to 64 letters, digits, _ and -.")],
        help_text="The name, which no tool of the catalogue has.",
    )
    description = StrictCharField(
        max_length=CLIENT_TOOL_DESCRIPTION_MAX_CHARS,
        allow_blank=True,
        trim_whitespace=False,
        help_text="What the tool does and when to use it.",
    )
    input_schema = SentSchemaField(help_text="The JSON Schema of the arguments: an object, at most 16 KiB.")

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := unknown_fields(data, self.fields)):
            raise serializers.ValidationError(unknown)
        return super().to_internal_value(data)


class ClientToolsField(BoundedListField):
    """The tools as they are stored with a run."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(child=ClientToolInput(), max_length=CLIENT_TOOLS_MAX, **kwargs)

    def to_internal_value(self, data: Any) -> list[dict[str, Any]]:
        tools = super().to_internal_value(data)
        names = [tool["name"] for tool in tools]
        wrong: dict[Any, Any] = {
            index: {"name": ["Another tool of this list has this name."]}
            for index, name in enumerate(names)
            if name in names[:index]
        }
        if wrong:
            raise serializers.ValidationError(wrong)
        return [
            {"name": tool["name"], "description": tool["description"], "inputSchema": tool["input_schema"]}
            for tool in tools
        ]


class CallResultInput(CamelSerializer):
    """Exactly one of both."""

    result = AnyField(required=False, help_text="The result: text for the model, or any JSON.")
    error = StrictCharField(
        min_length=1,
        max_length=1000,
        required=False,
        trim_whitespace=False,
        help_text="Why the call failed; the model is told it.",
    )

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        if len(values) != 1:
            raise serializers.ValidationError({"result": ["Send a result or an error, and not both."]})
        return values
