"""Shapes of API keys (docs/resources.md, "API keys") and of session tokens (docs/identity.md)."""

from typing import Any

from rest_framework import serializers

from apikeys import keys
from config.api.authentication import EMAIL_MAX, USERNAME_MAX, email_of
from config.api.serializers import CamelSerializer, StrictCharField, StrictIntegerField, TimestampField


class ApiKeyInputSerializer(CamelSerializer):
    name = StrictCharField(max_length=100, help_text="The name of the key, 1 to 100 characters.")
    expiration_days = StrictIntegerField(
        min_value=1, max_value=keys.API_KEY_MAX_DAYS, required=False, help_text="How many days the key is valid."
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


class SessionTokenInputSerializer(CamelSerializer):
    sub = StrictCharField(
        min_length=1,
        max_length=USERNAME_MAX,
        trim_whitespace=False,
        help_text="Your own id of the person: always the same for the same person, and never given to another.",
    )
    email = StrictCharField(
        required=False, allow_null=True, max_length=EMAIL_MAX, help_text="The e-mail address of the person."
    )
    hours = StrictIntegerField(min_value=1, max_value=24, default=12, help_text="How long the token is valid.")

    def validate_email(self, value: str | None) -> Any:
        if value is not None and email_of(value) is None:
            raise serializers.ValidationError("This is not an e-mail address.")
        return value


class SessionTokenSerializer(CamelSerializer):
    token = serializers.CharField(read_only=True, help_text="The session token, for requests to `/api/v1`.")
    expires_at = TimestampField(help_text="When the token stops working.")
