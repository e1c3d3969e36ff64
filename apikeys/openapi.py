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


class ServerKeyScheme(OpenApiAuthenticationExtension):
    target_class = "apikeys.authentication.ServerKeyAuthentication"
    name = "serverKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "aws_…",
            "description": "A server key, which staff create for a trusted backend. It only makes session tokens.",
        }


PART = Part(
    tags={
        "session-tokens": "Session tokens for the users of an app with its own sign-in.",
        "api-keys": "Keys of the public surface.",
        "key": "The key that a request bears.",
    },
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
        "POST session-tokens": Operation(
            "Make a session token",
            "A trusted backend makes a session token for one of its users, with a server key. Only where the service "
            "issues its session tokens itself, otherwise 409.",
            sent={"sub": "user-4711", "email": "ada@example.com", "hours": 1},
            answered={
                "token": "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ1c2VyLTQ3MTEifQ.c2ln",
                "expiresAt": "2026-11-20T13:30:00.000Z",
            },
        ),
        "GET api-keys": Operation("List API keys"),
        "DELETE api-keys/{keyId}": Operation("Revoke an API key"),
        "GET key": Operation("Get the key of this request"),
    },
    components={
        "ApiKey": "A key without its secret.",
        "ApiKeyInputRequest": "A new key: its name, its scopes and the days until it expires.",
        "CreatedApiKey": "A new key. This answer alone holds its `secret`.",
        "SessionToken": "A session token. The service does not store it.",
        "SessionTokenInputRequest": "The person whose token it is.",
        "OwnKey": "The key that the request bears.",
    },
)
