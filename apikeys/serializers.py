"""Shapes of API keys (docs/api.md, "API keys")."""

from __future__ import annotations

from django.conf import settings
from rest_framework import serializers

from config.api.serializers import CamelSerializer, StrictCharField, StrictIntegerField, TimestampField


class ApiKeyInputSerializer(CamelSerializer):
    name = StrictCharField(max_length=100, help_text="The name of the key, 1 to 100 characters.")
    expiration_days = StrictIntegerField(
        min_value=1, max_value=settings.API_KEY_MAX_DAYS, required=False, help_text="How many days the key is valid."
    )


class OwnKeySerializer(CamelSerializer):
    """What a key can read about itself."""

    name = serializers.CharField(read_only=True, help_text="The name of the key.")
    prefix = serializers.CharField(read_only=True, help_text="The first 8 characters of the secret.")
    scopes = serializers.ListField(child=serializers.CharField(), read_only=True, help_text="What the key may do.")
    expires_at = TimestampField(help_text="When the key stops working.")


class ApiKeySerializer(OwnKeySerializer):
    id = serializers.CharField(read_only=True)
    created_at = TimestampField()
    last_used_at = TimestampField(allow_null=True, help_text="When the key was last used, to the minute, or null.")
    revoked_at = TimestampField(allow_null=True, help_text="When the key was revoked, or null.")


class CreatedApiKeySerializer(ApiKeySerializer):
    """The only answer with the secret."""

    secret = serializers.CharField(read_only=True, help_text="The API key itself. Only this answer contains it.")
