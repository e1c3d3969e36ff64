"""The OpenAPI document as a whole: what drf-spectacular can't read from a view is added here, by its hooks.

Each app describes its operations and shapes in the ``PART`` of its ``openapi.py``, which ``OPENAPI_PARTS`` names. Only
the texts that hold for every operation are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from config.api.errors import envelope
from config.kernel.errors import BY_STATUS, DomainError


@dataclass(frozen=True)
class Operation:
    """An operation's summary and description, with an example of the body sent and of the body answered.

    Without a description, the operation has the one that its view gives.
    """

    summary: str
    description: str = ""
    sent: Any = None
    answered: Any = None


@dataclass(frozen=True)
class Part:
    """What one app adds to the document.

    ``operations`` are by method and path within a surface, for both surfaces. ``components`` are the descriptions of
    schemas by name, ``fields`` those of fields that mean the same in all schemas. ``errors`` are examples of the app's
    own codes, or better examples of the shared codes.
    """

    tags: Mapping[str, str]
    operations: Mapping[str, Operation]
    components: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[DomainError, ...] = ()


SURFACES = ("/api/v1/", "/api/public/v1/")
PRODUCTION = {
    "url": "https://{host}",
    "description": "Production",
    "variables": {"host": {"default": "agents.example.com"}},
}
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
HEADERS = {
    name: {"description": description, "schema": schema}
    for name, description, schema in (
        ("X-Request-Id", "The id of the request: the caller's own if it sent a well-formed one.", TEXT),
        ("X-RateLimit-Limit", "Requests a minute.", WHOLE),
        ("X-RateLimit-Remaining", "Requests left now.", WHOLE),
        ("X-RateLimit-Reset", "Seconds until the full number is available again.", WHOLE),
        ("Retry-After", "Seconds until a request is accepted again.", WHOLE | {"minimum": 1}),
        ("WWW-Authenticate", "Always `Bearer`.", TEXT),
        ("Idempotent-Replayed", "`true` if the answer is that of an earlier request.", TEXT | {"enum": ["true"]}),
    )
}
ON_EVERY_ANSWER = ("X-Request-Id",)
ON_ERRORS = {401: ("WWW-Authenticate",), 429: ("Retry-After",)}
RATE_LIMIT = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")


@cache
def parts() -> list[Part]:
    return [import_string(name) for name in settings.OPENAPI_PARTS]


@cache
def operations() -> dict[str, Operation]:
    return {name: operation for part in parts() for name, operation in part.operations.items()}


@cache
def errors() -> dict[int, dict[str, DomainError]]:
    """An example of each error by status and code. The shared code of a status comes first."""
    found: dict[int, dict[str, DomainError]] = {status: {kind.code: kind()} for status, kind in BY_STATUS.items()}
    for error in (error for part in parts() for error in part.errors):
        found.setdefault(error.status, {})[error.code] = error
    return found


def load_parts(endpoints: Any) -> Any:
    """A drf-spectacular pre-processing hook: the apps' modules register their extensions when they are imported."""
    parts()
    return endpoints


def complete(result: dict[str, Any], generator: Any, request: Any, public: Any) -> dict[str, Any]:
    """A drf-spectacular post-processing hook."""
    result["info"]["description"] = import_string(settings.OPENAPI_DESCRIPTION)
    result["info"]["contact"] = {"name": "The operator of this service", "url": settings.BASE_URL}
    result["servers"] = [{"url": settings.BASE_URL, "description": "This service"}, PRODUCTION]
    result["tags"] = [{"name": name, "description": text} for part in parts() for name, text in part.tags.items()]
    components = result["components"]
    components["headers"] = HEADERS
    given = {
        status for methods in result["paths"].values() for entry in methods.values() for status in entry["responses"]
    }
    components["responses"] = {
        response_name(status): error_response(status) for status in sorted(errors()) if str(status) in given
    }
    descriptions = {name: text for part in parts() for name, text in part.components.items()}
    fields = {name: text for part in parts() for name, text in part.fields.items()}
    for name, schema in components["schemas"].items():
        if name in descriptions:
            schema["description"] = descriptions[name]
        elif name.startswith("Paginated"):
            schema["description"] = "One page of a list."
        elif "enum" not in schema:
            schema.pop("description", None)
        for property_name, shape in schema.get("properties", {}).items():
            if property_name in fields:
                shape.setdefault("description", fields[property_name])
    for path, methods in result["paths"].items():
        for method, operation in methods.items():
            describe(f"{method.upper()} {relative(path)}", operation)
            if "requestBody" in operation:
                close(operation["requestBody"], components["schemas"], changes=method == "patch")
    return result


def close(body: dict[str, Any], schemas: dict[str, Any], *, changes: bool) -> None:
    """Say that a body has no other fields, and that it is required if one of its fields is. Changes name a field."""

    def resolve(schema: dict[str, Any]) -> dict[str, Any]:
        return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    whole = resolve(body["content"]["application/json"]["schema"])
    for schema in map(resolve, whole.get("oneOf", [whole])):
        schema["additionalProperties"] = False
        if schema.get("required"):
            body["required"] = True
        elif changes:
            body["required"], schema["minProperties"] = True, 1
        for shape in schema.get("properties", {}).values():
            if "default" in shape:
                # Some generators make a field with a default required.
                shape["description"] = f"{shape['description']} Default: `{shape.pop('default')}`."


def relative(path: str) -> str:
    """The path within its surface."""
    surface = next((prefix for prefix in SURFACES if path.startswith(prefix)), "/")
    return path.removeprefix(surface)


def describe(name: str, operation: dict[str, Any]) -> None:
    """Put the operation's summary, examples and headers in."""
    known = operations().get(name, Operation(""))
    if known.summary:
        operation["summary"] = known.summary
    if known.description:
        operation["description"] = known.description
    if known.sent is not None:
        operation["requestBody"]["content"]["application/json"]["examples"] = {"example": {"value": known.sent}}
    idempotent = any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", ()))
    for status, response in operation["responses"].items():
        if "$ref" in response:
            continue
        replayed = ("Idempotent-Replayed",) if idempotent else ()
        response["headers"] = headers(*ON_EVERY_ANSWER, *RATE_LIMIT, *replayed) | response.get("headers", {})
        response["description"] = response.get("description") or HTTPStatus(int(status)).phrase
        if known.answered is not None and "application/json" in response.get("content", {}):
            response["content"]["application/json"]["examples"] = {"example": {"value": known.answered}}


def response_name(status: int) -> str:
    """The name of the component for the answer of a status: the first code of that status."""
    return "".join(word.capitalize() for word in next(iter(errors()[status])).split("_"))


def error_response(status: int) -> dict[str, Any]:
    """The answer to every error of this status."""
    examples = {
        code: {"value": envelope(code, error.message, error.details)} for code, error in errors()[status].items()
    }
    return {
        "description": " or ".join(f"`{code}`" for code in examples),
        "headers": headers(*ON_EVERY_ANSWER, *RATE_LIMIT, *ON_ERRORS.get(status, ())),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ApiError"}, "examples": examples}},
    }


def headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
