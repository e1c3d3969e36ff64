"""The OpenAPI document: what drf-spectacular can't read from a view. Each app describes its part in ``openapi.yaml``:

- ``operations``, by method and path without the surface's prefix, for both surfaces: a summary, a description (default:
  the view's), examples of the bodies ``sent`` and ``answered``, and their schemas ``takes`` and ``gives`` if no
  serializer has them;
- ``paths``: whole operations, of views that are no viewsets;
- ``tags``, ``components`` and ``fields``: descriptions by name; a field means the same in all schemas;
- ``errors``: examples of error codes, by class and arguments;
- ``headers`` and ``schemas``: components. ``credentials``: security schemes.
"""

import inspect
from functools import cache
from http import HTTPStatus
from typing import Any

import yaml
from django.conf import settings
from django.core.validators import RegexValidator
from django.utils.module_loading import import_string
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import Direction

from config.api.errors import envelope
from config.api.serializers import camel
from config.kernel import money
from config.kernel.errors import BY_STATUS, DomainError

ON_EVERY_ANSWER = ("X-Request-Id", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")
ON_ERRORS = {401: ("WWW-Authenticate",), 429: ("Retry-After",)}

ALWAYS = {400, 401, 406, 429, 431, 500, 503}
BODY_METHODS = {"POST", "PUT", "PATCH"}


@cache
def parts() -> list[dict[str, Any]]:
    return [yaml.safe_load((settings.BASE_DIR / name).read_text(encoding="utf-8")) for name in settings.OPENAPI_PARTS]


@cache
def described(kind: str) -> dict[str, Any]:
    """All ``tags``, ``operations`` and so on of the parts."""
    return {name: text for part in parts() for name, text in part.get(kind, {}).items()}


@cache
def errors() -> dict[int, dict[str, DomainError]]:
    """An example of each error, by status and code. The shared code of a status comes first."""
    found: dict[int, dict[str, DomainError]] = {status: {kind.code: kind()} for status, kind in BY_STATUS.items()}
    for error in (import_string(name)(**given) for name, given in described("errors").items()):
        found.setdefault(error.status, {})[error.code] = error
    return found


def complete(result: dict[str, Any], generator: Any, request: Any, public: Any) -> dict[str, Any]:
    """A drf-spectacular post-processing hook."""
    result["info"]["description"] = next(part["description"] for part in parts() if "description" in part)
    result["info"]["contact"] = {"name": "The operator of this service", "url": settings.BASE_URL}
    result["servers"] = [{"url": settings.BASE_URL, "description": "This service"}, *described("servers").values()]
    result["tags"] = [{"name": name, "description": text} for name, text in described("tags").items()]
    components = result["components"]
    components["headers"] = described("headers")
    components["schemas"] = dict(sorted((components["schemas"] | described("schemas")).items()))
    operations = [operation for methods in result["paths"].values() for operation in methods.values()]
    given = {status for operation in operations for status in operation["responses"]}
    used = [status for status in sorted(errors()) if str(status) in given]
    components["responses"] = {response_name(status): error_response(status) for status in used}
    descriptions, fields = described("components"), described("fields")
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
        place = path.removeprefix("/api/v1/").removeprefix("/api/public/v1/")
        for method, operation in methods.items():
            known = described("operations").get(f"{method.upper()} {place}", {})
            describe(known, operation, components["schemas"])
            if "requestBody" in operation:
                close(operation["requestBody"], components["schemas"], method == "patch" or "any_of" in known)
    result["paths"] |= described("paths")
    return result


def resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def close(body: dict[str, Any], schemas: dict[str, Any], needs_any: bool) -> None:
    """State that a body has no other fields, and that it is required if one of its fields is, or if ``needs_any``."""
    whole = resolved(body["content"]["application/json"]["schema"], schemas)
    for schema in (resolved(each, schemas) for each in whole.get("oneOf", [whole])):
        schema.setdefault("additionalProperties", False)
        if schema.get("required"):
            body["required"] = True
        elif needs_any:
            body["required"], schema["minProperties"] = True, 1
        for shape in schema.get("properties", {}).values():
            if "default" in shape:
                # Some generators make a field with a default required.
                shape["description"] = f"{shape['description']} Default: `{shape.pop('default')}`."


def describe(known: dict[str, Any], operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    operation.update({text: known[text] for text in ("summary", "description") if text in known})
    if "takes" in known:
        operation["requestBody"] = {"content": {"application/json": {"schema": known["takes"]}}}
    if "gives" in known:
        operation["responses"]["200"] = {"content": {"application/json": {"schema": known["gives"]}}}
    if "sent" in known:
        operation["requestBody"]["content"]["application/json"]["examples"] = {"example": {"value": known["sent"]}}
    idempotent = any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", ()))
    for status, response in operation["responses"].items():
        if "$ref" in response:
            continue
        replayed = ("Idempotent-Replayed",) if idempotent else ()
        response["headers"] = headers(*ON_EVERY_ANSWER, *replayed) | response.get("headers", {})
        response["description"] = response.get("description") or HTTPStatus(int(status)).phrase
        if "answered" in known and (content := response.get("content", {}).get("application/json")):
            content["examples"] = {"example": {"value": with_nulls(known["answered"], content["schema"], schemas)}}


def with_nulls(example: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """The example with all fields of its schema, in order. Fields without a value are null."""
    schema = resolved(next((option for option in schema.get("oneOf", ()) if "$ref" in option), schema), schemas)
    if isinstance(example, list):
        return [with_nulls(item, schema["items"], schemas) for item in example]
    if not isinstance(example, dict) or "properties" not in schema:
        return example
    return {name: with_nulls(example.get(name), each, schemas) for name, each in schema["properties"].items()}


def response_name(status: int) -> str:
    """The name of the component for the answer of a status: the first code of that status."""
    return "".join(word.capitalize() for word in next(iter(errors()[status])).split("_"))


def error_response(status: int) -> dict[str, Any]:
    found = errors()[status]
    examples = {code: {"value": envelope(code, error.message, error.details)} for code, error in found.items()}
    return {
        "description": " or ".join(f"`{code}`" for code in examples),
        "headers": headers(*ON_EVERY_ANSWER, *ON_ERRORS.get(status, ())),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ApiError"}, "examples": examples}},
    }


def headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


class BearerScheme(OpenApiAuthenticationExtension):
    target_class = "config.api.authentication.BearerAuthentication"
    match_subclasses = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.target.scheme

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {"type": "http", "scheme": "bearer"} | described("credentials")[self.name]


class CreditsNumber(OpenApiSerializerFieldExtension):
    target_class = "config.api.serializers.CreditsNumberField"

    def map_serializer_field(self, auto_schema: Any, direction: Direction) -> dict[str, Any]:
        if direction != "request":
            return {"type": "number"}
        text, most, least = "Credits, with up to 6 decimals.", money.MAX_MICRO // money.MICRO, self.target.minimum
        limits = {"maximum": most} if least is None else {"maximum": most, "minimum": least / money.MICRO}
        return {"type": "number", "description": text, **limits}


class StrictText(OpenApiSerializerFieldExtension):
    """A text that is trimmed and must not be empty has the pattern ``\\S``."""

    target_class = "config.api.serializers.StrictCharField"
    match_subclasses = True
    priority = -1

    def map_serializer_field(self, auto_schema: Any, direction: Direction) -> dict[str, Any]:
        schema = auto_schema._map_serializer_field(self.target, direction, bypass_extensions=True)
        schema["type"] = "string"  # the caller adds null
        is_matched = any(isinstance(rule, RegexValidator) for rule in self.target.validators)
        if self.target.pattern:
            schema["pattern"] = self.target.pattern
        elif direction == "request" and self.target.trim_whitespace and not (self.target.allow_blank or is_matched):
            schema["pattern"] = r"\S"
        return schema


class ServiceSchema(AutoSchema):
    """``view.error_statuses`` (action → statuses) adds what the schema can't see; a negative status removes one."""

    view: Any  # a ServiceViewSet

    def get_operation_id(self) -> str:
        """``sessionRunsCancel``: surface, path, action."""
        words = [token.replace("-", "_") for token in self._tokenize_path()]
        if not words[-1].endswith(self.view.action):
            words.append(self.view.action)
        return camel("_".join(["session" if self.view.surface == "server" else self.view.surface, *words]))

    def get_description(self) -> str:  # type: ignore[override]
        """The action's own docstring; never its class's, which is for readers of the code."""
        return inspect.cleandoc(getattr(self.view, self.view.action).__doc__ or "")

    def get_tags(self) -> list[str]:
        """The first word of the path, unless the view names another tag."""
        return [self.view.tag] if hasattr(self.view, "tag") else super().get_tags()

    def get_override_parameters(self) -> list[Any]:
        return [*self.view.query_parameters.get(self.view.action, []), *super().get_override_parameters()]

    def get_auth(self) -> list[dict[str, Any]]:
        scope = self.view.required_scope()
        return [{name: [scope] if scope else [] for name in each} for each in super().get_auth()]

    def _resolve_path_parameters(self, variables: list[str]) -> list[dict[str, Any]]:
        parameters = super()._resolve_path_parameters(variables)
        for parameter in parameters:
            if parameter["schema"].get("type") == "string":
                parameter["schema"]["minLength"] = 1
            parameter.setdefault("description", f"The id of the {parameter['name'].removesuffix('Id')}.")
        return parameters

    def _get_parameters(self) -> list[dict[str, Any]]:
        parameters = super()._get_parameters()
        if self._is_idempotent():
            parameters.append({"in": "header", "name": "Idempotency-Key"} | described("parameters")["Idempotency-Key"])
        return parameters

    def _get_response_bodies(self, direction: Direction = "response") -> dict[str, Any]:
        responses = super()._get_response_bodies(direction)
        for status in sorted(self.error_statuses()):
            responses.setdefault(str(status), {"$ref": f"#/components/responses/{response_name(status)}"})
        return responses

    def error_statuses(self) -> set[int]:
        view, body = self.view, self.method in BODY_METHODS
        cases = {403: view.required_scope(), 404: "{" in self.path, 409: self._is_idempotent(), 413: body, 415: body}
        declared = view.error_statuses.get(view.action, set())
        found = ALWAYS | {status for status in cases if cases[status]} | declared
        return {status for status in found if status > 0 and -status not in declared}

    def _is_idempotent(self) -> bool:
        return self.method == "POST" and self.view.action in self.view.idempotent_actions
