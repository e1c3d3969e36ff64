"""Tool calls and waitpoints as clients see them, the client tools that clients send, and the answers of clients."""

from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.serializers import CharField, ChoiceField, DictField, IntegerField, ListField, SerializerMethodField

from config.api import serializers as fields
from config.api.serializers import CamelSerializer, CreditsNumberField, StrictCharField, TimestampField, unknown_fields
from config.kernel import money
from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import dumps
from runs.catalogue.serializers import SentSchemaField
from runs.models import Awaiting, InvocationStatus, Waitpoint, WaitpointKind, WaitpointStatus
from runs.tools.base import shown_result
from runs.tools.schema import check_answer, one_check_of

CLIENT_TOOLS_MAX = 32
ANSWER_DATA_MAX_BYTES = 64 * 1024  # of the data that answers a question with a schema
OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True}
# The text that says why something failed or was refused.
WHY: dict[str, Any] = {"min_length": 1, "max_length": 1000, "trim_whitespace": False}


class ToolInvocationSerializer(CamelSerializer):
    """Needs a call of ``services.shown_calls``. ``openapi.yaml`` has the schema of the progress."""

    id = CharField()
    agent_run_id = CharField(source="run_id", help_text="The run that made the call.")
    turn_index = IntegerField(min_value=1, help_text="The model turn that made the call, from 1.")
    call_index = IntegerField(min_value=1, help_text="The position of the call within its turn, from 1.")
    tool_call_id = CharField(help_text="The id that the model gave the call.")
    name = CharField(help_text="The name of the tool.")
    node_type = CharField(help_text="The type of the tool: `builtin`, `http`, `mcp` or `client`.")
    input = DictField(help_text="The arguments as the model gave them.")
    status = ChoiceField(
        choices=InvocationStatus.values,
        help_text="`PENDING`, `DISPATCHING`, then `COMPLETED` or `FAILED`; `REFUSED` or `CANCELLED` without a call.",
    )
    awaiting = ChoiceField(
        choices=Awaiting.values,
        allow_null=True,
        help_text="Who gives the outcome of an open call that takes long: the `tool`, or the caller's app (`client`).",
    )
    expires_at = TimestampField(allow_null=True, help_text="Until when the call awaits its outcome, or null.")
    progress = SerializerMethodField(help_text="The last progress of a call that awaits its outcome.")
    credit_estimate = CreditsNumberField(help_text="The most that the call may cost, in credits.")
    credit_used = CreditsNumberField(help_text="What the call cost, in credits; 0 unless it is completed.")
    result = SerializerMethodField(
        help_text="The first 8 KiB of the text that the model received; null unless the call is completed."
    )
    result_truncated = SerializerMethodField(help_text="Whether `result` is only the beginning.")
    result_urls = ListField(child=CharField(), help_text="Files and pages that the tool created.")
    error_code = CharField(allow_null=True, help_text="Why the call failed, for programs; otherwise null.")
    error_message = CharField(allow_null=True, help_text="Why the call failed, for people; otherwise null.")
    started_at = TimestampField(allow_null=True, help_text="When the call was made, or null.")
    finished_at = TimestampField(allow_null=True, help_text="When the call ended, or null.")
    duration_ms = IntegerField(allow_null=True, help_text="How long the call took, in milliseconds, or null.")
    created_at = TimestampField()
    updated_at = TimestampField()

    @extend_schema_field({"oneOf": [{"$ref": "#/components/schemas/Progress"}, {"type": "null"}]})
    def get_progress(self, call: Any) -> dict[str, Any] | None:
        return call.progress if call.awaiting else None

    def get_result(self, call: Any) -> str | None:
        is_completed = call.status == InvocationStatus.COMPLETED
        return shown_result(call.result_start, call.result_urls)[0] if is_completed else None

    def get_result_truncated(self, call: Any) -> bool:
        return shown_result(call.result_start, call.result_urls)[1]


# The fields of a call that an API key without the scope runs:read sees: none of them has text of the run.
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
        max_length=2000, allow_blank=True, trim_whitespace=False, help_text="What the tool does and when to use it."
    )
    # Not in snake_case, because a run stores its tools as they are sent.
    inputSchema = SentSchemaField(help_text="The JSON Schema of the arguments: an object, at most 16 KiB.")

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := unknown_fields(data, self.fields)):
            raise serializers.ValidationError(unknown)
        return super().to_internal_value(data)


class ClientToolsField(fields.BoundedListField):
    """A list of client tools; the value has the form in which a run stores them."""

    child = ClientToolInput()

    def run_child_validation(self, data: list[Any]) -> list[dict[str, Any]]:
        """Stops at the first tool with a problem, because the check of a slow schema costs a process."""
        tools: list[dict[str, Any]] = []
        try:
            for item in data:
                tools.append(self.child.run_validation(item))
        except serializers.ValidationError as error:
            where: dict[Any, Any] = {len(tools): error.detail}
            raise serializers.ValidationError(where) from None
        return tools

    def to_internal_value(self, data: Any) -> list[dict[str, Any]]:
        tools = super().to_internal_value(data)
        names = [tool["name"] for tool in tools]
        taken = {"name": ["Another tool of this list has this name."]}
        wrong: dict[Any, Any] = {index: taken for index, name in enumerate(names) if name in names[:index]}
        if wrong:
            raise serializers.ValidationError(wrong)
        return tools


class CallResultInput(CamelSerializer):
    """Exactly one of both."""

    result = fields.AnyField(required=False, help_text="The result: text for the model, or any JSON.")
    error = StrictCharField(**WHY, required=False, help_text="Why the call failed; the model is told it.")

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        if len(values) != 1:
            raise serializers.ValidationError({"result": ["Send a result or an error, and not both."]})
        return values


class WaitpointSerializer(CamelSerializer):
    """``openapi.yaml`` has the schemas of the payloads."""

    id = CharField()
    agent_run_id = CharField(source="run_id", help_text="The run that waits.")
    kind = ChoiceField(
        choices=WaitpointKind.values, help_text="What the run needs: an approval of credits, or an answer."
    )
    status = ChoiceField(
        choices=WaitpointStatus.values,
        help_text="`PENDING` until the first answer (`COMPLETED`) or the end of the time limit (`EXPIRED`).",
    )
    request_payload = SerializerMethodField(help_text="What is asked. Its fields depend on `kind`.")
    resolved_payload = SerializerMethodField(help_text="The answer that counted, or null. Its fields depend on `kind`.")
    expires_at = TimestampField(help_text="Until when an answer is accepted.")
    resolved_at = TimestampField(allow_null=True, help_text="When the waitpoint was answered or expired, or null.")

    @extend_schema_field({"$ref": "#/components/schemas/WaitpointRequestPayload"})
    def get_request_payload(self, waitpoint: Any) -> dict[str, Any]:
        payload: dict[str, Any] = waitpoint.request_payload
        if waitpoint.kind != WaitpointKind.CREDIT_APPROVAL:
            return payload
        return {
            "toolName": payload["toolName"],
            "estimatedCredits": money.to_number(payload["estimatedMicro"]),
            "threshold": money.to_number(payload["thresholdMicro"]),
            **{name: payload[name] for name in ("toolInvocationId", "input", "reason", "topUpUrl") if name in payload},
        }

    @extend_schema_field({"oneOf": [{"$ref": "#/components/schemas/WaitpointResolvedPayload"}, {"type": "null"}]})
    def get_resolved_payload(self, waitpoint: Any) -> dict[str, Any] | None:
        return waitpoint.resolved_payload


class CreditApprovalAnswer(CamelSerializer):
    kind = ChoiceField(choices=[WaitpointKind.CREDIT_APPROVAL.value], help_text="The kind of the waitpoint.")
    approved = fields.StrictBooleanField(help_text="For CREDIT_APPROVAL.")
    reason = StrictCharField(
        **WHY, **OPTIONAL, help_text="For CREDIT_APPROVAL: why. The model is told the reason of a refusal."
    )
    max_credits = CreditsNumberField(
        minimum=1,
        **OPTIONAL,
        help_text="For CREDIT_APPROVAL of a run that waits for credits: a higher budget, in credits.",
    )


class ClarificationAnswer(CamelSerializer):
    kind = ChoiceField(choices=[WaitpointKind.CLARIFICATION.value], help_text="The kind of the waitpoint.")
    answer = StrictCharField(
        required=False, min_length=1, max_length=10_000, trim_whitespace=False, help_text="For CLARIFICATION."
    )
    data = DictField(  # type: ignore[assignment]
        required=False,
        error_messages={"not_a_dict": "A JSON object is required."},
        help_text="For CLARIFICATION with a `schema`: an object that fits it.",
    )
    declined = fields.StrictBooleanField(
        required=False, help_text="For CLARIFICATION with a `schema`, true: the tool gets no data."
    )


class AnswerKind(CamelSerializer):
    ignores_unknown = True
    kind = ChoiceField(choices=WaitpointKind.values, help_text="The kind of the waitpoint.")


ANSWERS = {WaitpointKind.CREDIT_APPROVAL: CreditApprovalAnswer, WaitpointKind.CLARIFICATION: ClarificationAnswer}


def check_clarification(waitpoint: Waitpoint, given: dict[str, Any]) -> None:
    """Raises ValidationFailed unless a question with a schema has data or ``declined``, and others have text."""
    schema = waitpoint.request_payload.get("schema")
    fitting = ("answer",) if schema is None else ("data", "declined")
    if wrong := [name for name in given if name not in fitting]:
        what = "with an answer" if schema is None else "with data that fits its schema, or declined"
        raise ValidationFailed({name: [f"This question is answered {what}."] for name in wrong})
    if len(given) != 1:
        both = "Give data, or decline; not both."
        raise ValidationFailed({fitting[0]: [both if given else "This field is required."]})
    if given.get("declined") is False:
        raise ValidationFailed({"declined": ["Leave it out, or decline with true."]})
    if "data" not in given:
        return
    if len(dumps(given["data"])) > ANSWER_DATA_MAX_BYTES:
        raise ValidationFailed({"data": [f"It may have at most {ANSWER_DATA_MAX_BYTES} bytes."]})
    with one_check_of(waitpoint.run.user_id):
        try:
            check_answer(schema, given["data"])
        except ValueError as error:
            raise ValidationFailed({"data": [str(error)]}) from None
