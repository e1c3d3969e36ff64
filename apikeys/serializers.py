"""Shapes of API keys (docs/api.md, "API keys")."""

from __future__ import annotations

from django.conf import settings
from rest_framework import serializers

from config.api.serializers import CamelSerializer, StrictCharField, StrictIntegerField, TimestampField


class ApiKeyInputSerializer(CamelSerializer):
    name = StrictCharField(max_length=100)
    expiration_days = StrictIntegerField(min_value=1, max_value=settings.API_KEY_MAX_DAYS, required=False)


class OwnKeySerializer(CamelSerializer):
    """What a key can read about itself."""

    name = serializers.CharField(read_only=True)
    prefix = serializers.CharField(read_only=True)
    scopes = serializers.ListField(child=serializers.CharField(), read_only=True)
    expires_at = TimestampField()


class ApiKeySerializer(OwnKeySerializer):
    id = serializers.CharField(read_only=True)
    created_at = TimestampField()
    last_used_at = TimestampField(allow_null=True)
    revoked_at = TimestampField(allow_null=True)


class CreatedApiKeySerializer(ApiKeySerializer):
    """The only answer with the secret."""

    secret = serializers.CharField(read_only=True)
