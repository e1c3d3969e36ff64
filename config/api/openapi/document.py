"""The OpenAPI document as a whole: what drf-spectacular can't read from a view is added here, by its hook.

Summaries and examples are found by method and path within a surface, the same for both.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.conf import settings

from config.api.errors import STATUS_CODES, envelope
from config.api.openapi.examples import ERROR_CODES, ERROR_DETAILS, EXAMPLES
from config.api.openapi.texts import COMPONENTS, DESCRIPTION, SUMMARIES, TAGS

SURFACES = ("/api/v1/", "/api/public/v1/")
PRODUCTION = {
    "url": "https://{host}",
    "description": "Production",
    "variables": {"host": {"default": "agents.example.com", "description": "Where the service is deployed."}},
}
HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The request's id: the caller's own if it sent a well-formed one.",
        "schema": {"type": "string"},
    },
    "X-RateLimit-Limit": {"description": "Requests a minute.", "schema": {"type": "integer"}},
    "X-RateLimit-Remaining": {"description": "Requests left now.", "schema": {"type": "integer"}},
    "X-RateLimit-Reset": {
        "description": "Seconds until the full number is there again.",
        "schema": {"type": "integer"},
    },
    "Retry-After": {
        "description": "Seconds until a request is let through again.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {"description": "Always `Bearer`.", "schema": {"type": "string"}},
    "Idempotent-Replayed": {
        "description": "`true` on the stored answer to an earlier request with the same Idempotency-Key.",
        "schema": {"type": "string", "enum": ["true"]},
    },
}
ON_EVERY_ANSWER = ("X-Request-Id",)
ON_ERRORS = {401: ("WWW-Authenticate",), 429: ("Retry-After",)}
RATE_LIMIT = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")


def complete(result: dict[str, Any], generator: Any, request: Any, public: Any) -> dict[str, Any]:
    """A drf-spectacular post-processing hook."""
    result["info"]["description"] = DESCRIPTION
    result["servers"] = [{"url": settings.BASE_URL, "description": "This service"}, PRODUCTION]
    result["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    components = result["components"]
    components["headers"] = HEADERS
    components["responses"] = {response_name(status): error_response(status) for status in ERROR_CODES}
    for name, schema in components["schemas"].items():
        if name in COMPONENTS:
            schema["description"] = COMPONENTS[name]
        elif "enum" not in schema:
            schema.pop("description", None)
    for path, methods in result["paths"].items():
        for method, operation in methods.items():
            describe(f"{method.upper()} {relative(path)}", operation)
    return result


def relative(path: str) -> str:
    """The path within its surface."""
    surface = next((prefix for prefix in SURFACES if path.startswith(prefix)), "/")
    return path.removeprefix(surface)


def describe(name: str, operation: dict[str, Any]) -> None:
    """Put the operation's summary, examples and headers in."""
    if name in SUMMARIES:
        operation["summary"] = SUMMARIES[name]
    sent, answered = EXAMPLES.get(name, (None, None))
    if sent is not None:
        operation["requestBody"]["content"]["application/json"]["examples"] = {"example": {"value": sent}}
    idempotent = any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", ()))
    for status, response in operation["responses"].items():
        if "$ref" in response:
            continue
        replayed = ("Idempotent-Replayed",) if idempotent else ()
        response["headers"] = headers(*ON_EVERY_ANSWER, *RATE_LIMIT, *replayed) | response.get("headers", {})
        response["description"] = response.get("description") or HTTPStatus(int(status)).phrase
        if answered is not None and "application/json" in response.get("content", {}):
            response["content"]["application/json"]["examples"] = {"example": {"value": answered}}


def response_name(status: int) -> str:
    """The component of a status' answer, called after its first code."""
    return "".join(word.capitalize() for word in next(iter(ERROR_CODES[status])).split("_"))


def error_response(status: int) -> dict[str, Any]:
    """The answer to every error of this status."""
    examples = {
        code: {"value": envelope(code, text or STATUS_CODES[status][1], ERROR_DETAILS.get(code))}
        for code, text in ERROR_CODES[status].items()
    }
    return {
        "description": " or ".join(f"`{code}`" for code in examples),
        "headers": headers(*ON_EVERY_ANSWER, *RATE_LIMIT, *ON_ERRORS.get(status, ())),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ApiError"}, "examples": examples}},
    }


def headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
