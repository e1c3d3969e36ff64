"""The deliveries in the OpenAPI document: each event's body, and the headers that come with it."""

from __future__ import annotations

from typing import Any

EVENTS: dict[str, str] = {
    "agent.started": "A run begins to run; again each time it goes on after waiting for an answer.",
    "agent.completed": "A run has finished.",
    "agent.failed": "A run has ended in failure.",
    "tool.completed": "A tool invocation has completed.",
}
MOMENT = {"type": "string", "format": "date-time"}
TEXT = {"type": "string"}
EXTRA: dict[str, dict[str, Any]] = {
    "agent.failed": {"errorCode": TEXT},
    "tool.completed": {
        "toolInvocationId": TEXT,
        "name": TEXT,
        "status": {"type": "string", "enum": ["COMPLETED"]},
        "creditUsed": {"type": "number"},
    },
}
EXAMPLE: dict[str, Any] = {
    "id": "evt_01kb5w3v2m8x4c9z6t7q0r1s2d",
    "runId": "run_01kb5w3v1c4d5e6f7g8h9j0k1m",
    "chatId": "chat_01kb5w3tzp2q3r4s5t6v7w8x9y",
    "occurredAt": "2026-11-20T12:34:56.789Z",
    "errorCode": "MODEL_TIMEOUT",
    "toolInvocationId": "inv_01kb5w3v4z5a6b7c8d9e0f1g2h",
    "name": "draw_chart",
    "status": "COMPLETED",
    "creditUsed": 12,
}
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
    "X-Service-Delivery-Attempt": ("The attempt's number.", {"type": "integer", "minimum": 1, "maximum": 5}),
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
    result["webhooks"] = {event: {"post": operation(event)} for event in EVENTS}
    return result


def operation(event: str) -> dict[str, Any]:
    """The POST that a receiver gets."""
    fields = {"id": TEXT, "type": {"type": "string", "const": event}, "runId": TEXT, "chatId": TEXT}
    fields |= {"occurredAt": MOMENT} | EXTRA.get(event, {})
    body = {"type": "object", "required": list(fields), "properties": fields}
    example = {name: EXAMPLE.get(name, event) for name in fields}
    return {
        "operationId": "webhook" + "".join(word.capitalize() for word in event.split(".")),
        "summary": EVENTS[event],
        "tags": ["webhooks"],
        # Proven by its signature: a receiver asks for no credential.
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
            "2XX": {"description": "Taken."},
            "default": {"description": "Anything else, also a redirect, is a failure: up to 4 more attempts follow."},
        },
    }
