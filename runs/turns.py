"""A turn of a run as clients see it: what it used, what it cost, and the text of its reasoning."""

from collections.abc import Iterable, Iterator
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.api.serializers import CamelSerializer, CreditsNumberField, TimestampField

REASONING_SHOWN_CHARS = 8 * 1024
# The fields in which providers give reasoning: a text, or a list of items with such fields.
REASONING_FIELDS = ("thinking", "summary", "text", "value")


class TurnSerializer(CamelSerializer):
    """Needs a turn of ``services.turns_of``."""

    index = serializers.IntegerField(min_value=1, help_text="The number of the turn, from 1.")
    model = serializers.CharField(help_text="The model that answered.")
    finish_reason = serializers.CharField(help_text="Why the model stopped: `stop`, `tool_calls` or `length`.")
    input_tokens = serializers.IntegerField(min_value=0, help_text="All tokens that were sent to the model.")
    cached_input_tokens = serializers.IntegerField(
        min_value=0, source="cached_tokens", help_text="Those of them that the provider read from its cache."
    )
    output_tokens = serializers.IntegerField(min_value=0, help_text="The tokens of the model's answer.")
    reasoning_tokens = serializers.IntegerField(min_value=0, help_text="Those of them that were reasoning.")
    credit_used = CreditsNumberField(source="cost", help_text="What the turn cost, without its tool calls, in credits.")
    reasoning = serializers.SerializerMethodField(
        help_text="The beginning of the text of the model's reasoning; null if the provider gives none."
    )
    started_at = TimestampField(help_text="When the model was asked.")
    finished_at = TimestampField(help_text="When its answer was complete.")

    @extend_schema_field(serializers.CharField(allow_null=True))
    def get_reasoning(self, turn: Any) -> str | None:
        return reasoning_text(turn.shown_reasoning or ())[:REASONING_SHOWN_CHARS] or None


def reasoning_text(items: Iterable[Any]) -> str:
    """Of ``Turn.reasoning``. Empty if the provider gave only encrypted items."""
    return "\n\n".join(_texts(items)).strip()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        # ``runs.llm.http`` keeps an item with its place in the turn.
        item = value["item"] if isinstance(value.get("item"), dict) else value
        for field in REASONING_FIELDS:
            yield from _texts(item.get(field))
    elif isinstance(value, Iterable):
        for part in value:
            yield from _texts(part)
