"""API keys in the OpenAPI document: the public surface's security scheme, and the operations on keys."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

from config.api.openapi.document import Operation, Part


class ApiKeyScheme(OpenApiAuthenticationExtension):
    target_class = "apikeys.authentication.ApiKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "awk_…",
            "description": "An API key of `/api/public/v1`, with the scopes that operations name.",
        }


PART = Part(
    tags={"api-keys": "Keys of the public surface.", "key": "The key that a request bears."},
    operations={
        "POST api-keys": Operation(
            "Create an API key",
            sent={"name": "Nightly report", "expirationDays": 30},
            answered={
                "id": "key_01kb5w3v6v7w8x9y0z1a2b3c4d",
                "name": "Nightly report",
                "prefix": "awk_5tQz",
                "scopes": ["chats:read", "chats:write", "runs:read", "runs:write"],
                "expiresAt": "2026-12-20T12:30:00.000Z",
                "createdAt": "2026-11-20T12:30:00.000Z",
                "lastUsedAt": None,
                "revokedAt": None,
                "secret": "awk_5tQzExampleExampleExampleExampleExampleExampleExam",
            },
        ),
        "GET api-keys": Operation("List API keys"),
        "DELETE api-keys/{keyId}": Operation("Revoke an API key"),
        "GET key": Operation("Get the key of this request"),
    },
    components={
        "ApiKey": "A key without its secret.",
        "CreatedApiKey": "A new key. This answer alone holds its `secret`.",
        "OwnKey": "The key that the request bears.",
    },
)
