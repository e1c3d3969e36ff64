"""What waitpoints ask, as clients see it, and how clients answer them."""

from typing import Any

from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema_field
from rest_framework import serializers

from config.api.serializers import (
    CamelSerializer,
    CreditsNumberField,
    StrictBooleanField,
    StrictCharField,
    TimestampField,
)
from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import dumps
from runs.events import request_payload
from runs.models import Waitpoint, WaitpointKind, WaitpointStatus
from runs.tools.schema import check_answer, one_check_of

# Bytes of the data that answers a question with a schema.
ANSWER_DATA_MAX_BYTES = 64 * 1024
OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True}


class CreditApprovalQuestion(CamelSerializer):
    tool_name = serializers.CharField(help_text="The tool that the model wants to call, or `model` for a turn.")
    estimated_credits = CreditsNumberField(
        help_text="The most that the call may cost, in credits; with a `reason`, the least that the next step needs."
    )
    threshold = CreditsNumberField(help_text="The threshold of the run, in credits; with a `reason`, what is left.")
    tool_invocation_id = serializers.CharField(allow_null=True, help_text="The call; null for a turn.")
    reason = serializers.ChoiceField(
        choices=["INSUFFICIENT_CREDITS", "BUDGET_EXCEEDED"],
        required=False,
        help_text="Only of a run that waits for credits: what does not reach for the next step.",
    )
    top_up_url = serializers.CharField(
        required=False, allow_null=True, help_text="With a `reason`: where the user buys credits, or null."
    )
    input = serializers.DictField(
        allow_null=True, help_text="The arguments of the call. Null in a list of runs if they have more than 8 KiB."
    )


class ClarificationQuestion(CamelSerializer):
    question = serializers.CharField(help_text="The question of the agent.")
    options = serializers.ListField(
        child=serializers.CharField(), required=False, help_text="Answers that the agent suggests."
    )
    tool_invocation_id = serializers.CharField(
        required=False, help_text="The call whose tool asks for data that fits `schema`."
    )
    schema = serializers.DictField(
        required=False,
        allow_null=True,
        help_text="The JSON Schema of the answer's `data`. Null in a list of runs if it has more than 8 KiB.",
    )


class CreditApprovalResolution(CamelSerializer):
    approved = serializers.BooleanField(help_text="Whether the call was approved.")
    reason = serializers.CharField(required=False, help_text="The reason that the answer gave.")
    by = serializers.ChoiceField(
        choices=["grant", "refund", "adjustment", "release"],
        required=False,
        help_text="What made the credits reach, of a run that waited for them, if nobody answered.",
    )
    max_credits = CreditsNumberField(required=False, help_text="The higher budget that the answer gave.")
    responded_at = TimestampField(help_text="When the answer was given.")


class ClarificationResolution(CamelSerializer):
    answer = serializers.CharField(help_text="The answer to a question without a `schema`.")
    responded_at = TimestampField(help_text="When the answer was given.")


class FormResolution(CamelSerializer):
    data = serializers.DictField(  # type: ignore[assignment]  # DRF moves the fields away from their class
        help_text="The answer to a question with a `schema`."
    )
    responded_at = TimestampField(help_text="When the answer was given.")


class FormRefusal(CamelSerializer):
    declined = serializers.BooleanField(help_text="True: the tool gets no data.")
    responded_at = TimestampField(help_text="When the answer was given.")


QUESTION = PolymorphicProxySerializer(
    "WaitpointRequestPayload", [CreditApprovalQuestion, ClarificationQuestion], resource_type_field_name=None
)
RESOLUTION = PolymorphicProxySerializer(
    "WaitpointResolvedPayload",
    [CreditApprovalResolution, ClarificationResolution, FormResolution, FormRefusal],
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


class CreditApprovalAnswer(CamelSerializer):
    kind = serializers.ChoiceField(
        choices=[WaitpointKind.CREDIT_APPROVAL.value], help_text="The kind of the waitpoint."
    )
    approved = StrictBooleanField(help_text="For CREDIT_APPROVAL.")
    reason = StrictCharField(
        min_length=1,
        max_length=1000,
        **OPTIONAL,
        trim_whitespace=False,
        help_text="For CREDIT_APPROVAL: why. The model is told the reason of a refusal.",
    )
    max_credits = CreditsNumberField(
        minimum=1,
        **OPTIONAL,
        help_text="For CREDIT_APPROVAL of a run that waits for credits: a higher budget, in credits.",
    )


class ClarificationAnswer(CamelSerializer):
    kind = serializers.ChoiceField(choices=[WaitpointKind.CLARIFICATION.value], help_text="The kind of the waitpoint.")
    answer = StrictCharField(
        required=False, min_length=1, max_length=10_000, trim_whitespace=False, help_text="For CLARIFICATION."
    )
    data = serializers.DictField(  # type: ignore[assignment]
        required=False,
        error_messages={"not_a_dict": "A JSON object is required."},
        help_text="For CLARIFICATION with a `schema`: an object that fits it.",
    )
    declined = StrictBooleanField(
        required=False, help_text="For CLARIFICATION with a `schema`, true: the tool gets no data."
    )


class AnswerKind(CamelSerializer):
    ignores_unknown = True
    kind = serializers.ChoiceField(choices=WaitpointKind.values, help_text="The kind of the waitpoint.")


ANSWERS = {
    WaitpointKind.CREDIT_APPROVAL.value: CreditApprovalAnswer,
    WaitpointKind.CLARIFICATION.value: ClarificationAnswer,
}


def check_clarification(waitpoint: Waitpoint, given: dict[str, Any]) -> None:
    """A question with a schema is answered with data or declined, any other one with text. Raises ValidationFailed."""
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
