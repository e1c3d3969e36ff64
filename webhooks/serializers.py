"""The webhook endpoint and its deliveries as clients see them (docs/webhooks.md)."""

from typing import Any

from drf_spectacular.utils import extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from config.api.serializers import CamelSerializer, NullableText, StrictBooleanField, StrictCharField, TimestampField
from config.kernel import clock
from webhooks.events import Event
from webhooks.models import Delivery, Endpoint
from webhooks.services import URL_MAX_CHARS, check_url

EXTENDED = f"Whether the extended events are sent too: {', '.join(f'`{event}`' for event in Event if event.extended)}."


@extend_schema_serializer(component_name="WebhookEndpoint")
class EndpointSerializer(CamelSerializer):
    """Shows both secrets in full if the context holds ``reveal``."""

    id = serializers.CharField()
    url = serializers.CharField(help_text="Where events are sent.")
    secret = serializers.SerializerMethodField(
        help_text="The key of the signatures: in full when it is created, later its last 4 characters."
    )
    secondary_secret = serializers.SerializerMethodField(
        help_text="The previous secret while it is still used after a rotation; otherwise null."
    )
    enabled = serializers.BooleanField(help_text="Whether events are sent.")
    extended_events = serializers.BooleanField(help_text=EXTENDED)
    created_at = TimestampField()
    updated_at = TimestampField()

    def get_secret(self, endpoint: Endpoint) -> str:
        return self.shown(endpoint.secret)

    def get_secondary_secret(self, endpoint: Endpoint) -> str | None:
        secondary = endpoint.secondary_at(clock.now())
        return self.shown(secondary) if secondary else None

    def shown(self, secret: str) -> str:
        return secret if self.context.get("reveal") else f"••••{secret[-4:]}"


class AddressField(StrictCharField):
    pattern = r"^https?://([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?([/?][^\s#\\]*)?$"


class EndpointInput(CamelSerializer):
    url = AddressField(
        max_length=URL_MAX_CHARS,
        trim_whitespace=False,
        help_text="An absolute http or https address without credentials or fragment.",
    )
    rotate_secret = StrictBooleanField(default=False, help_text="Whether to create a new secret.")
    extended_events = StrictBooleanField(
        required=False, help_text=f"{EXTENDED} False for a new endpoint. A later call without it keeps it."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Resolves the host, so no transaction may be open."""
        check_url(attrs["url"])
        return attrs


class EndpointChanges(CamelSerializer):
    enabled = StrictBooleanField(required=False, help_text="Whether events are sent.")
    extended_events = StrictBooleanField(required=False, help_text=EXTENDED)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not attrs:
            raise serializers.ValidationError({"enabled": "Name a field to change: enabled or extendedEvents."})
        return attrs


class AttemptSerializer(CamelSerializer):
    number = serializers.IntegerField(help_text="The number of the attempt, from 1.")
    started_at = TimestampField(help_text="When the attempt started.")
    duration_ms = serializers.IntegerField(help_text="How long the attempt took, in milliseconds.")
    status_code = serializers.IntegerField(
        allow_null=True, help_text="The HTTP status of the answer, or null if there was no answer."
    )
    error = NullableText("Why there was no answer, or null.")


class DeliverySerializer(CamelSerializer):
    id = serializers.CharField()
    event_id = serializers.CharField(help_text="The id of the event, the same in all its deliveries.")
    event_type = serializers.CharField(help_text="The name of the event.")
    run_id = NullableText("The run that caused the event. Null for `webhook.test`.")
    chat_id = NullableText("The chat of the run. Null for `webhook.test`.")
    status = serializers.ChoiceField(
        choices=Delivery.Status.choices,
        help_text="`PENDING` until an attempt succeeds (`DELIVERED`) or the last one fails (`DEAD`).",
    )
    next_attempt_at = serializers.SerializerMethodField(
        help_text="When the next attempt is due. Null when the delivery is finished, and during an attempt."
    )
    created_at = TimestampField()
    finished_at = TimestampField(allow_null=True, help_text="When the delivery succeeded or was given up, or null.")
    attempts = AttemptSerializer(many=True, help_text="The attempts so far, oldest first.")

    @extend_schema_field({"type": ["string", "null"], "format": "date-time"})
    def get_next_attempt_at(self, delivery: Delivery) -> Any:
        return None if delivery.claim_id else clock.iso(delivery.next_attempt_at)
