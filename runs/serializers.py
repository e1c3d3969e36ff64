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
    agent_run_id = serializers.CharField(source="run_id")
    turn_index = serializers.IntegerField(min_value=1)
    call_index = serializers.IntegerField(min_value=1)
    tool_call_id = serializers.CharField()
    name = serializers.CharField()
    node_type = serializers.CharField()
    input = serializers.DictField()
    status = serializers.ChoiceField(choices=InvocationStatus.values)
    credit_estimate = CreditsNumberField()
    credit_used = CreditsNumberField()
    result = serializers.SerializerMethodField()
    result_truncated = serializers.SerializerMethodField()
    result_urls = serializers.ListField(child=serializers.CharField())
    error_code = serializers.CharField(allow_null=True)
    error_message = serializers.CharField(allow_null=True)
    started_at = TimestampField(allow_null=True)
    finished_at = TimestampField(allow_null=True)
    duration_ms = serializers.IntegerField(allow_null=True)
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
    tool_name = serializers.CharField()
    estimated_credits = CreditsNumberField()
    threshold = CreditsNumberField()


class ClarificationQuestion(CamelSerializer):
    question = serializers.CharField()
    options = serializers.ListField(child=serializers.CharField(), required=False)


class CreditApprovalResolution(CamelSerializer):
    approved = serializers.BooleanField()
    responded_at = TimestampField()


class ClarificationResolution(CamelSerializer):
    answer = serializers.CharField()
    responded_at = TimestampField()


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
    agent_run_id = serializers.CharField(source="run_id")
    kind = serializers.ChoiceField(choices=WaitpointKind.values)
    status = serializers.ChoiceField(choices=WaitpointStatus.values)
    request_payload = serializers.SerializerMethodField()
    resolved_payload = serializers.SerializerMethodField()
    expires_at = TimestampField()
    resolved_at = TimestampField(allow_null=True)

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
    status = serializers.ChoiceField(choices=RunStatus.values)
    user_message_id = serializers.CharField()
    assistant_message_id = serializers.CharField(allow_null=True)
    last_stream_index = serializers.IntegerField(min_value=0)
    cancel_requested_at = TimestampField(allow_null=True)
    requested_model = serializers.CharField(allow_null=True)
    resolved_model = serializers.CharField(allow_null=True)
    error_code = serializers.CharField(allow_null=True)
    error_message = serializers.CharField(allow_null=True)
    created_at = TimestampField()
    updated_at = TimestampField()
    started_at = TimestampField(allow_null=True)
    finished_at = TimestampField(allow_null=True)
    total_credits_used = CreditsNumberField(source="credits_spent")
    pending_waitpoint = serializers.SerializerMethodField()

    @extend_schema_field(WaitpointSerializer(allow_null=True))
    def get_pending_waitpoint(self, run: Any) -> dict[str, Any] | None:
        return WaitpointSerializer(run.pending_waitpoints[0]).data if run.pending_waitpoints else None


class RunSerializer(RunFields):
    """Needs a run of ``services.runs_of``."""

    tool_invocations = ToolInvocationSerializer(many=True, source="calls")


class RunSummarySerializer(RunFields):
    """A run in a list: nothing that grows with the run. Needs a run of ``services.summaries_of``."""

    tool_invocation_count = serializers.IntegerField(min_value=0)


class RunInput(CamelSerializer):
    message = StrictCharField(min_length=1, max_length=settings.MESSAGE_MAX_CHARS, trim_whitespace=False)
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
    kind = serializers.ChoiceField(choices=[WaitpointKind.CREDIT_APPROVAL.value])
    approved = StrictBooleanField(help_text="For CREDIT_APPROVAL.")


class ClarificationAnswer(CamelSerializer):
    kind = serializers.ChoiceField(choices=[WaitpointKind.CLARIFICATION.value])
    answer = StrictCharField(min_length=1, max_length=10_000, trim_whitespace=False, help_text="For CLARIFICATION.")


class AnswerKind(CamelSerializer):
    ignores_unknown = True
    kind = serializers.ChoiceField(choices=WaitpointKind.values)


ANSWERS = {
    WaitpointKind.CREDIT_APPROVAL.value: CreditApprovalAnswer,
    WaitpointKind.CLARIFICATION.value: ClarificationAnswer,
}


class ModelSerializer(CamelSerializer):
    """Prices are credits per 1,000 tokens."""

    name = serializers.CharField()
    display_name = serializers.CharField()
    provider = serializers.CharField()
    input_price = CreditsNumberField(source="price_in")
    output_price = CreditsNumberField(source="price_out")
    is_default = serializers.BooleanField()


class ToolSerializer(CamelSerializer):
    """The price is the maximum number of credits for one call."""

    name = serializers.CharField()
    display_name = serializers.CharField()
    description = serializers.CharField()
    node_type = serializers.CharField()
    input_schema = serializers.DictField()
    price = CreditsNumberField()
    approval = serializers.CharField()
