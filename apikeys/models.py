"""API keys of the public surface, and server keys. Only a digest of the secret is stored."""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models.functions import Now

from config.kernel.ids import IdField


class Key(models.Model):
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=8)
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(db_default=Now())
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    expires_at: Any = None

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class ApiKey(Key):
    id = IdField(prefix="key")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="api_keys", db_index=False)
    scopes = models.JSONField()
    expires_at = models.DateTimeField()

    class Meta:
        ordering = ["-created_at", "-id"]
        permissions = [("revoke_apikey", "Can revoke API keys"), ("narrow_apikey", "Can narrow API keys' scopes")]
        indexes = [
            models.Index("user", "created_at", "id", name="api_key_by_user"),
            models.Index("prefix", name="api_key_by_prefix"),
        ]


# The scopes of server keys: making session tokens for any user; granting, revoking and reading any user's credits.
SESSION_TOKENS, CREDITS = "session-tokens", "credits"


def session_tokens_only() -> list[str]:
    return [SESSION_TOKENS]


class ServerKey(Key):
    """A key of an app's trusted backend. It is good for its scopes, and for nothing else. It is its own caller."""

    is_active = True

    id = IdField(prefix="swk")
    scopes = models.JSONField(default=session_tokens_only)

    class Meta:
        permissions = [("create_serverkey", "Can create server keys"), ("revoke_serverkey", "Can revoke server keys")]
