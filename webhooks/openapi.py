"""Webhooks in the OpenAPI document: the request that a receiver gets for each event."""

from __future__ import annotations

from typing import Any

from webhooks.events import TEXT, USER_ID, Event
from webhooks.transitions import MAX_ATTEMPTS

HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Service-Signature": (
        "`sha384=` and the lowercase hex of HMAC-SHA384 over `<X-Service-Timestamp>.<raw body>`, keyed with the secret",
        {"type": "string", "pattern": "^sha384=[0-9a-f]{96}$"},
    ),
    "X-Service-Timestamp": (
        "The attempt's time in milliseconds since the epoch. Refuse one that is more than 300 seconds off.",
        {"type": "string", "pattern": "^[0-9]+$"},
    ),
    "X-Service-Event-Id": ("The event's id, the same on every attempt.", TEXT),
    "X-Service-Delivery-Attempt": ("The attempt's number.", {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPTS}),
    "webhook-id": ("The event's id, after the Standard Webhooks specification.", TEXT),
    "webhook-timestamp": ("The attempt's time in seconds since the epoch.", {"type": "string", "pattern": "^[0-9]+$"}),
    "webhook-signature": (
        "`v1,` and the base64 of HMAC-SHA256 over `<webhook-id>.<webhook-timestamp>.<raw body>`; two of them, "
        "separated by a space, after a rotation of the secret.",
        TEXT,
    ),
}


def add_webhooks(result: dict[str, Any], generator: Any, request: Any, public: Any) -> dict[str, Any]:
    """A drf-spectacular post-processing hook."""
    result["webhooks"] = {event.value: {"post": operation(event)} for event in Event}
    return result


def operation(event: Event) -> dict[str, Any]:
    """The POST that a receiver gets."""
    fields = event.fields
    example = {name: field["example"] for name, field in fields.items()}
    properties = {
        name: {key: value for key, value in field.items() if key != "example"}
        for name, field in (fields | {"userId": USER_ID}).items()
    }
    body = {"type": "object", "required": list(fields), "properties": properties}
    asked = ", if its endpoint has `extendedEvents`" if event.extended else ""
    return {
        "operationId": "webhook" + "".join(word.capitalize() for word in event.split(".")),
        "summary": event.sent_when,
        "description": f"The POST that a receiver gets for `{event.value}`{asked}. Answer with a 2xx status.",
        "tags": ["webhooks"],
        # The signature is the proof: a receiver asks for no credential.
        "security": [],
        "parameters": [
            {"in": "header", "name": name, "required": True, "description": text, "schema": schema}
            for name, (text, schema) in HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "examples": {"example": {"value": example}}}},
        },
        "responses": {
            "2XX": {"description": "Received."},
            "default": {
                "description": "Any other response, also a redirect, is a failure. "
                f"Up to {MAX_ATTEMPTS - 1} more attempts follow."
            },
        },
    }
