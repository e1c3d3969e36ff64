"""Runs and their turns as clients see them, and what clients send."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from django.conf import settings
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.serializers import CharField, ChoiceField, DictField, IntegerField, SerializerMethodField

from chats import attachments
from config.api import serializers as fields
from config.api.serializers import CamelSerializer, CreditsNumberField, NullableText, StrictCharField, TimestampField
from config.kernel.jsontext import dumps
from runs import models
from runs.calls import CLIENT_TOOLS_MAX, OPTIONAL, ClientToolsField, ToolInvocationSerializer, WaitpointSerializer
from runs.catalogue.serializers import OutputSchemaField
from runs.models import FINAL_RUN_STATUSES, RunMetadata

RUN_INSTRUCTIONS_MAX_CHARS = 20_000
# In a list of runs: the most bytes of the input of a call that waits for an approval.
INPUT_LISTED_BYTES = 8 * 1024
REASONING_SHOWN_CHARS = 8 * 1024
# The fields in which providers give reasoning: a text, or a list of items with such fields.
REASONING_FIELDS = ("thinking", "summary", "text", "value")
FINAL_STATUSES = ", ".join(f"`{status}`" for status in FINAL_RUN_STATUSES)
NAME: dict[str, Any] = {"min_length": 1, "max_length": 100, **OPTIONAL}
TEXT: dict[str, Any] = {"min_length": 1, "trim_whitespace": False, **OPTIONAL}
METADATA_KEY = re.compile(rf"[A-Za-z0-9_.-]{{1,{RunMetadata.KEY_MAX_CHARS}}}")
METADATA_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": f"^{METADATA_KEY.pattern}$"},
    "additionalProperties": {"type": "string", "maxLength": RunMetadata.VALUE_MAX_CHARS},
    "maxProperties": RunMetadata.PAIRS_MAX,
}


class UsageSerializer(CamelSerializer):
    """Sums over the run's turns so far."""

    input_tokens = IntegerField(min_value=0, help_text="All tokens that were sent to models.")
    cached_input_tokens = IntegerField(min_value=0, help_text="Those of them that a provider read from its cache.")
    output_tokens = IntegerField(min_value=0, help_text="The tokens of the models' answers.")
    turns = IntegerField(min_value=0, source="turn_count", help_text="The answers of models.")
    model_retries = IntegerField(
        min_value=0, help_text="Requests to models that failed and were followed by another one."
    )


class RunFields(CamelSerializer):
    """What every representation of a run has."""

    id = CharField()
    chat_id = CharField()
    status = ChoiceField(choices=models.RunStatus.values, help_text=f"Final are {FINAL_STATUSES}.")
    awaiting = ChoiceField(
        choices=models.Awaiting.values,
        allow_null=True,
        help_text="`client` if an open call awaits the caller's app, else `tool` if one awaits its tool, else null.",
    )
    user_message_id = CharField(help_text="The message that started the run.")
    assistant_message_id = NullableText("The message with the agent's answer; null until the run first executes.")
    last_stream_index = IntegerField(min_value=0, help_text="The index of the newest stream event; 0 before the first.")
    cancel_requested_at = TimestampField(allow_null=True, help_text="When the run was asked to stop, or null.")
    requested_model = NullableText("The model that the request named, or null.")
    resolved_model = NullableText("The model that the run uses; null until it first executes.")
    error_code = NullableText("Why the run failed, for programs; otherwise null.")
    error_message = NullableText("Why the run failed, for people; otherwise null.")
    agent = NullableText("The version of the agent that the run is pinned to, `name@3`, or null.")
    replaced_by = NullableText(
        "The run that took the place of this one, or of an earlier one of the chat (`replaces`), or null."
    )
    created_at = TimestampField()
    updated_at = TimestampField()
    started_at = TimestampField(allow_null=True, help_text="When the run first executed, or null.")
    finished_at = TimestampField(allow_null=True, help_text="When the run ended, or null.")
    finish_reason = ChoiceField(
        choices=["stop", "length"],
        allow_null=True,
        help_text="Why the answer ended: `length` says that it was cut at the output limit. Null until then.",
    )
    limited_by = ChoiceField(
        choices=["model", "budget", "credits"],
        allow_null=True,
        help_text="With `length`, what the output limit was from: the model, the run's budget or the user's credits. "
        "Otherwise null.",
    )
    metadata = DictField(child=CharField(allow_blank=True), help_text="The pairs of text that the request gave.")
    usage = UsageSerializer(source="*", help_text="What the run's turns used so far.")
    total_credits_used = CreditsNumberField(
        source="credits_spent", help_text="What the run cost so far: captures and usage minus refunds, in credits."
    )
    pending_waitpoint = SerializerMethodField(help_text="The waitpoint that the run waits for, or null.")

    @extend_schema_field(WaitpointSerializer(allow_null=True))
    def get_pending_waitpoint(self, run: Any) -> dict[str, Any] | None:
        if run.status != models.RunStatus.WAITING:
            return None
        # The waitpoint may have been answered since the run was read.
        asked = next(iter(run.pending_waitpoints or run.waitpoints.order_by("-created_at")[:1]), None)
        return WaitpointSerializer(asked).data if asked else None


class RunSerializer(RunFields):
    """Needs a run of ``services.find_run``."""

    answer = NullableText("The content of the assistant's message as it stands; null until the run first executes.")
    output = DictField(
        allow_null=True, help_text="The answer as an object that fits `outputSchema`; null until the run is completed."
    )
    tool_invocations = ToolInvocationSerializer(
        many=True, source="calls", help_text="The tool calls of the run, in order."
    )


# The fields of a run and of a question that a key without the scope runs:read sees: no text of the run.
RUN_STATE = {
    *("id", "chatId", "status", "awaiting", "userMessageId", "assistantMessageId", "lastStreamIndex"),
    "cancelRequestedAt",
    *("requestedModel", "resolvedModel", "agent", "errorCode", "createdAt", "updatedAt", "startedAt", "finishedAt"),
    *("finishReason", "limitedBy", "usage", "totalCreditsUsed", "replacedBy"),
}
QUESTION_STATE = {"toolName", "estimatedCredits", "threshold", "toolInvocationId", "reason", "topUpUrl"}


def run_without_text(run: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"toolInvocations": [], "metadata": {}}
    return {name: value if name in RUN_STATE else empty.get(name) for name, value in run.items()}


def waitpoint_without_text(waitpoint: dict[str, Any]) -> dict[str, Any]:
    """``resolvedPayload`` stays, because it says which answer counted."""
    asked = {name: value for name, value in waitpoint["requestPayload"].items() if name in QUESTION_STATE}
    empty = {"question": ""} if waitpoint["kind"] == models.WaitpointKind.CLARIFICATION else {"input": None}
    return {**waitpoint, "requestPayload": asked | empty}


class RunSummarySerializer(RunFields):
    """A run in a list: nothing that grows with the run. Needs a run of ``services.summaries_of``."""

    tool_invocation_count = IntegerField(min_value=0, help_text="The number of tool calls.")

    @extend_schema_field(WaitpointSerializer(allow_null=True))
    def get_pending_waitpoint(self, run: Any) -> dict[str, Any] | None:
        waitpoint = super().get_pending_waitpoint(run)
        for name in ("input", "schema"):
            if waitpoint and len(dumps(waitpoint["requestPayload"].get(name))) > INPUT_LISTED_BYTES:
                waitpoint["requestPayload"] |= {name: None}
        return waitpoint


@extend_schema_field(METADATA_SCHEMA)
class MetadataField(DictField):
    """Pairs of text that belong to the caller."""

    json_schema: ClassVar[dict[str, Any]] = METADATA_SCHEMA
    default_error_messages: ClassVar = {"not_a_dict": "An object is required."}
    child = StrictCharField(max_length=RunMetadata.VALUE_MAX_CHARS, allow_blank=True, trim_whitespace=False)

    def run_child_validation(self, data: Mapping[str, Any]) -> dict[str, str]:
        if len(data) > RunMetadata.PAIRS_MAX:
            raise serializers.ValidationError(f"At most {RunMetadata.PAIRS_MAX} pairs.")
        if wrong := [key[: RunMetadata.KEY_MAX_CHARS] for key in data if not METADATA_KEY.fullmatch(key)]:
            message = f"A key has 1 to {RunMetadata.KEY_MAX_CHARS} of the characters A-Z, a-z, 0-9, _, . and -."
            raise serializers.ValidationError({key: [message] for key in wrong})
        return super().run_child_validation(data)


class RunInput(CamelSerializer):
    message = StrictCharField(
        max_length=settings.MESSAGE_MAX_CHARS,
        **TEXT,
        help_text="The message of the user. With `replaces`, that run's message and attachments if left out.",
    )
    attachment_ids = fields.BoundedListField(
        child=StrictCharField(),
        **OPTIONAL,
        max_length=attachments.ATTACHMENTS_PER_MESSAGE_MAX,
        help_text="Completed attachments, each used once.",
    )
    agent = StrictCharField(
        **NAME, help_text="An agent, `name`, or a version of it, `name@3`. It gives what the other fields leave out."
    )
    model = StrictCharField(**NAME, help_text="The name of a model; the agent's or else the default one if left out.")
    tools = fields.BoundedListField(
        child=StrictCharField(min_length=1, max_length=64),
        **OPTIONAL,
        max_length=200,
        help_text="The names of the tools that the run may call; all that the agent has if left out.",
    )
    instructions = StrictCharField(
        max_length=RUN_INSTRUCTIONS_MAX_CHARS,
        **TEXT,
        help_text="What the model is told beside the agent's own instructions. API keys may be refused it.",
    )
    output_schema = OutputSchemaField(
        **OPTIONAL,
        help_text="The JSON Schema of an object, at most 16 KiB and 16 levels deep: the run answers with `output`, "
        "which fits it.",
    )
    credit_approval_threshold = CreditsNumberField(
        minimum=0,
        **OPTIONAL,
        help_text="Credits, with up to 6 decimals. A tool call with a higher estimate waits for approval.",
    )
    max_credits = CreditsNumberField(
        minimum=1,
        **OPTIONAL,
        help_text="Credits, with up to 6 decimals: the most that the run may spend. An agent's own limit holds too.",
    )
    metadata = MetadataField(
        **OPTIONAL, help_text="Pairs of text of the caller's own, at most 16. Lists of runs can be filtered by them."
    )
    client_tools = ClientToolsField(
        **OPTIONAL,
        max_length=CLIENT_TOOLS_MAX,
        help_text="At most 32 tools that the caller's app executes; a call of one awaits "
        "`POST /tool-invocations/{id}/result`.",
    )
    on_active_run = ChoiceField(
        choices=["reject", "enqueue", "cancel"],
        required=False,
        default="reject",
        help_text="If the chat has an active run: reject this one, enqueue it behind the active one, or cancel the "
        "active one and those queued behind it.",
    )
    on_credits_exhausted = ChoiceField(
        choices=models.OnCreditsExhausted.values,
        **OPTIONAL,
        help_text="Where credits or budget are not enough for the next step: `fail`, or `wait` for more; the agent's "
        "choice if left out.",
    )
    replaces = StrictCharField(
        **OPTIONAL,
        help_text="A finished run of the chat, whose place the new run takes: that run and all after it are replaced. "
        "It may also be one that `onActiveRun: cancel` ends now.",
    )


class TurnSerializer(CamelSerializer):
    """Needs a turn of ``services.turns_of``."""

    index = IntegerField(min_value=1, help_text="The number of the turn, from 1.")
    model = CharField(help_text="The model that answered.")
    finish_reason = CharField(help_text="Why the model stopped: `stop`, `tool_calls` or `length`.")
    input_tokens = IntegerField(min_value=0, help_text="All tokens that were sent to the model.")
    cached_input_tokens = IntegerField(
        min_value=0, source="cached_tokens", help_text="Those of them that the provider read from its cache."
    )
    output_tokens = IntegerField(min_value=0, help_text="The tokens of the model's answer.")
    reasoning_tokens = IntegerField(min_value=0, help_text="Those of them that were reasoning.")
    credit_used = CreditsNumberField(source="cost", help_text="What the turn cost, without its tool calls, in credits.")
    reasoning = SerializerMethodField(
        help_text="The beginning of the text of the model's reasoning; null if the provider gives none."
    )
    started_at = TimestampField(help_text="When the model was asked.")
    finished_at = TimestampField(help_text="When its answer was complete.")

    def get_reasoning(self, turn: Any) -> str | None:
        return "\n\n".join(_texts(turn.shown_reasoning or ())).strip()[:REASONING_SHOWN_CHARS] or None


def _texts(value: Any) -> Iterator[str]:
    """The texts in items of ``Turn.reasoning``; none if the provider gave only encrypted ones."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        # ``runs.llm.http`` stores an item with its position in the turn.
        item = value["item"] if isinstance(value.get("item"), dict) else value
        for field in REASONING_FIELDS:
            yield from _texts(item.get(field))
    elif isinstance(value, Iterable):
        for part in value:
            yield from _texts(part)
