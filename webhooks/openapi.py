"""Webhooks in the OpenAPI document: the request that a receiver gets for each event."""

from typing import Any

from config.api.openapi import described
from webhooks.events import AnyEvent, CreditsEvent, Event, TrialEvent


def add_webhooks(result: dict[str, Any], generator: Any, request: Any, public: Any) -> dict[str, Any]:
    """A drf-spectacular post-processing hook."""
    result["webhooks"] = {event.value: {"post": operation(event)} for event in [*Event, *CreditsEvent, *TrialEvent]}
    return result


def operation(event: AnyEvent) -> dict[str, Any]:
    """The POST that a receiver gets."""
    common, installation = described("webhook_fields"), described("webhook_installation_fields")
    if not isinstance(event, Event):
        common = common | (installation if isinstance(event, CreditsEvent) else {})
        common = {name: field for name, field in common.items() if name not in ("runId", "chatId")}
        installation = {}
    fields = {name: dict(field) for name, field in (common | event.fields | installation).items()}
    fields["type"] |= {"const": event.value, "example": event.value}
    example = {name: field.pop("example") for name, field in fields.items()}
    required = [name for name in fields if name not in installation]
    body = {"type": "object", "required": required, "properties": fields}
    example = {name: example[name] for name in required}
    asked = ", if its endpoint has `extendedEvents`" if event.extended else ""
    asked = ", which is the installation endpoint" if isinstance(event, CreditsEvent) else asked
    headers, responses = described("webhook_headers"), described("webhook_responses")
    return {
        "operationId": "webhook" + "".join(word.capitalize() for word in event.split(".")),
        "summary": event.sent_when,
        "description": f"The POST that a receiver gets for `{event.value}`{asked}. Answer with a 2xx status.",
        "tags": ["webhooks"],
        # A receiver needs no credential, because the delivery is signed.
        "security": [],
        "parameters": [{"in": "header", "name": name, "required": True, **header} for name, header in headers.items()],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "examples": {"example": {"value": example}}}},
        },
        "responses": {status: {"description": text} for status, text in responses.items()},
    }
