"""The webhook endpoint and its deliveries as clients see them (docs/webhooks.md)."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from config.api.serializers import CamelSerializer, StrictBooleanField, StrictCharField, TimestampField
from config.kernel import clock
from webhooks.models import Delivery, Endpoint
from webhooks.services import URL_MAX_CHARS


def mask(secret: str) -> str:
    return f"••••{secret[-4:]}"


@extend_schema_serializer(component_name="WebhookEndpoint")
class EndpointSerializer(CamelSerializer):
    """Shows both secrets in full if the context holds ``reveal``."""

    id = serializers.CharField()
    url = serializers.CharField()
    secret = serializers.SerializerMethodField()
    secondary_secret = serializers.SerializerMethodField()
    enabled = serializers.BooleanField()
    created_at = TimestampField()
    updated_at = TimestampField()

    def get_secret(self, endpoint: Endpoint) -> str:
        return self.shown(endpoint.secret)

    def get_secondary_secret(self, endpoint: Endpoint) -> str | None:
        secondary = endpoint.secondary_at(clock.now())
        return self.shown(secondary) if secondary else None

    def shown(self, secret: str) -> str:
        return secret if self.context.get("reveal") else mask(secret)


class EndpointInput(CamelSerializer):
    url = StrictCharField(max_length=URL_MAX_CHARS, trim_whitespace=False)
    rotate_secret = StrictBooleanField(default=False)


class EndpointChanges(CamelSerializer):
    enabled = StrictBooleanField()


class AttemptSerializer(CamelSerializer):
    number = serializers.IntegerField()
    started_at = TimestampField()
    duration_ms = serializers.IntegerField()
    status_code = serializers.IntegerField(allow_null=True)
    error = serializers.CharField(allow_null=True)


class DeliverySerializer(CamelSerializer):
    id = serializers.CharField()
    event_id = serializers.CharField()
    event_type = serializers.CharField()
    run_id = serializers.CharField()
    chat_id = serializers.CharField()
    status = serializers.ChoiceField(choices=Delivery.Status.choices)
    next_attempt_at = serializers.SerializerMethodField()
    created_at = TimestampField()
    finished_at = TimestampField(allow_null=True)
    attempts = AttemptSerializer(many=True)

    @extend_schema_field({"type": ["string", "null"], "format": "date-time"})
    def get_next_attempt_at(self, delivery: Delivery) -> Any:
        """Null when the delivery is finished, and while an attempt is under way."""
        return None if delivery.claim_id else clock.iso(delivery.next_attempt_at)


class DeliveryFilter(CamelSerializer):
    ignores_unknown = True
    status = serializers.ChoiceField(choices=Delivery.Status.choices, required=False)
