"""Runs, invocations and waitpoints as clients see them, and what they send."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema_field
from rest_framework import serializers

from config.api.serializers import (
    BoundedListField,
    CamelSerializer,
    CreditsNumberField,
    StrictBooleanField,
    StrictCharField,
    TimestampField,
)
from runs.events import request_payload
from runs.models import InvocationStatus, RunStatus, WaitpointKind, WaitpointStatus

RESULT_SHOWN_BYTES = 8 * 1024


class ToolInvocationSerializer(CamelSerializer):
    """Needs a call of ``services.runs_of``."""

    id = serializers.CharField()
    agent_run_id = serializers.CharField(source="run_id", help_text="The run that made the call.")
    turn_index = serializers.IntegerField(min_value=1, help_text="The model turn that made the call, from 1.")
    call_index = serializers.IntegerField(min_value=1, help_text="The position of the call within its turn, from 1.")
    tool_call_id = serializers.CharField(help_text="The id that the model gave the call.")
    name = serializers.CharField(help_text="The name of the tool.")
    node_type = serializers.CharField(help_text="The type of the tool: `builtin`, `http` or `mcp`.")
    input = serializers.DictField(help_text="The arguments as the model gave them.")
    status = serializers.ChoiceField(
        choices=InvocationStatus.values,
        help_text="`PENDING`, `DISPATCHING`, then `COMPLETED` or `FAILED`; `REFUSED` or `CANCELLED` without a call.",
    )
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

    @extend_schema_field(serializers.CharField(allow_null=True))
    def get_result(self, call: Any) -> str | None:
        if call.status != InvocationStatus.COMPLETED:
            return None
        shown: str = call.result_start.encode()[:RESULT_SHOWN_BYTES].decode(errors="ignore")
        return shown

    def get_result_truncated(self, call: Any) -> bool:
        return len(call.result_start.encode()) > RESULT_SHOWN_BYTES


class CreditApprovalQuestion(CamelSerializer):
    tool_name = serializers.CharField(help_text="The tool that the model wants to call.")
    estimated_credits = CreditsNumberField(help_text="The most that the call may cost, in credits.")
    threshold = CreditsNumberField(help_text="The threshold of the run, in credits.")


class ClarificationQuestion(CamelSerializer):
    question = serializers.CharField(help_text="The question of the agent.")
    options = serializers.ListField(
        child=serializers.CharField(), required=False, help_text="Answers that the agent suggests."
    )


class CreditApprovalResolution(CamelSerializer):
    approved = serializers.BooleanField(help_text="Whether the call was approved.")
    responded_at = TimestampField(help_text="When the answer was given.")


class ClarificationResolution(CamelSerializer):
    answer = serializers.CharField(help_text="The answer.")
    responded_at = TimestampField(help_text="When the answer was given.")


QUESTION = PolymorphicProxySerializer(
    "WaitpointRequestPayload", [CreditApprovalQuestion, ClarificationQuestion], resource_type_field_name=None
)
RESOLUTION = PolymorphicProxySerializer(
    "WaitpointResolvedPayload",
    [CreditApprovalResolution, ClarificationResolution],
    resource_type_field_name=None,
    allow_null=True,
)


class WaitpointSerializer(CamelSerializer):
    id = serializers.CharField()
    agent_run_id = serializers.CharField(source="run_id", help_text="The run that waits.")
    kind = serializers.ChoiceField(
        choices=WaitpointKind.values, help_text="What the run needs: an approval of credits, or an answer."
    )
    status = serializers.ChoiceField(
        choices=WaitpointStatus.values,
        help_text="`PENDING` until the first answer (`COMPLETED`) or the end of the time limit (`EXPIRED`).",
    )
    request_payload = serializers.SerializerMethodField(help_text="What is asked. Its fields depend on `kind`.")
    resolved_payload = serializers.SerializerMethodField(
        help_text="The answer that counted, or null. Its fields depend on `kind`."
    )
    expires_at = TimestampField(help_text="Until when an answer is accepted.")
    resolved_at = TimestampField(allow_null=True, help_text="When the waitpoint was answered or expired, or null.")

    @extend_schema_field(QUESTION)
    def get_request_payload(self, waitpoint: Any) -> dict[str, Any]:
        return request_payload(waitpoint)

    @extend_schema_field(RESOLUTION)
    def get_resolved_payload(self, waitpoint: Any) -> dict[str, Any] | None:
        payload: dict[str, Any] | None = waitpoint.resolved_payload
        return payload


class RunFields(CamelSerializer):
    """What every representation of a run has."""

    id = serializers.CharField()
    chat_id = serializers.CharField()
    status = serializers.ChoiceField(
        choices=RunStatus.values, help_text="`completed`, `failed` and `cancelled` are final."
    )
    user_message_id = serializers.CharField(help_text="The message that started the run.")
    assistant_message_id = serializers.CharField(
        allow_null=True, help_text="The message with the agent's answer; null until the run first executes."
    )
    last_stream_index = serializers.IntegerField(
        min_value=0, help_text="The index of the newest stream event; 0 before the first."
    )
    cancel_requested_at = TimestampField(allow_null=True, help_text="When the run was asked to stop, or null.")
    requested_model = serializers.CharField(allow_null=True, help_text="The model that the request named, or null.")
    resolved_model = serializers.CharField(
        allow_null=True, help_text="The model that the run uses; null until it first executes."
    )
    error_code = serializers.CharField(allow_null=True, help_text="Why the run failed, for programs; otherwise null.")
    error_message = serializers.CharField(allow_null=True, help_text="Why the run failed, for people; otherwise null.")
    created_at = TimestampField()
    updated_at = TimestampField()
    started_at = TimestampField(allow_null=True, help_text="When the run first executed, or null.")
    finished_at = TimestampField(allow_null=True, help_text="When the run ended, or null.")
    total_credits_used = CreditsNumberField(
        source="credits_spent", help_text="What the run cost so far: captures and usage minus refunds, in credits."
    )
    pending_waitpoint = serializers.SerializerMethodField(help_text="The waitpoint that the run waits for, or null.")

    @extend_schema_field(WaitpointSerializer(allow_null=True))
    def get_pending_waitpoint(self, run: Any) -> dict[str, Any] | None:
        return WaitpointSerializer(run.pending_waitpoints[0]).data if run.pending_waitpoints else None


class RunSerializer(RunFields):
    """Needs a run of ``services.runs_of``."""

    tool_invocations = ToolInvocationSerializer(
        many=True, source="calls", help_text="The tool calls of the run, in order."
    )


class RunSummarySerializer(RunFields):
    """A run in a list: nothing that grows with the run. Needs a run of ``services.summaries_of``."""

    tool_invocation_count = serializers.IntegerField(min_value=0, help_text="The number of tool calls.")


class RunInput(CamelSerializer):
    message = StrictCharField(
        min_length=1, max_length=settings.MESSAGE_MAX_CHARS, trim_whitespace=False, help_text="The message of the user."
    )
    attachment_ids = BoundedListField(
        child=StrictCharField(),
        required=False,
        allow_null=True,
        max_length=settings.ATTACHMENTS_PER_MESSAGE_MAX,
        help_text="Completed attachments, each used once.",
    )
    model = StrictCharField(
        min_length=1,
        max_length=100,
        required=False,
        allow_null=True,
        help_text="The name of a model; the default one if left out.",
    )
    tools = BoundedListField(
        child=StrictCharField(min_length=1, max_length=64),
        required=False,
        allow_null=True,
        max_length=200,
        help_text="The names of the tools that the agent may call; all if left out.",
    )
    credit_approval_threshold = CreditsNumberField(
        minimum=0,
        required=False,
        allow_null=True,
        help_text="Credits, with up to 6 decimals. A tool call with a higher estimate waits for approval.",
    )
    max_credits = CreditsNumberField(
        minimum=1,
        required=False,
        allow_null=True,
        help_text="Credits, with up to 6 decimals: the most that the run may spend.",
    )
    on_active_run = serializers.ChoiceField(
        choices=["reject", "enqueue"],
        required=False,
        default="reject",
        help_text="If the chat has an active run: reject this one, or enqueue it behind the active one.",
    )


class CreditApprovalAnswer(CamelSerializer):
    kind = serializers.ChoiceField(
        choices=[WaitpointKind.CREDIT_APPROVAL.value], help_text="The kind of the waitpoint."
    )
    approved = StrictBooleanField(help_text="For CREDIT_APPROVAL.")


class ClarificationAnswer(CamelSerializer):
    kind = serializers.ChoiceField(choices=[WaitpointKind.CLARIFICATION.value], help_text="The kind of the waitpoint.")
    answer = StrictCharField(min_length=1, max_length=10_000, trim_whitespace=False, help_text="For CLARIFICATION.")


class AnswerKind(CamelSerializer):
    ignores_unknown = True
    kind = serializers.ChoiceField(choices=WaitpointKind.values, help_text="The kind of the waitpoint.")


ANSWERS = {
    WaitpointKind.CREDIT_APPROVAL.value: CreditApprovalAnswer,
    WaitpointKind.CLARIFICATION.value: ClarificationAnswer,
}


class ModelSerializer(CamelSerializer):
    """Prices are credits per 1,000 tokens."""

    name = serializers.CharField(help_text="The name that requests use.")
    display_name = serializers.CharField(help_text="The name that people see.")
    provider = serializers.CharField(help_text="The provider of the model.")
    input_price = CreditsNumberField(source="price_in", help_text="Credits per 1,000 tokens of input.")
    output_price = CreditsNumberField(source="price_out", help_text="Credits per 1,000 tokens of output.")
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
