"""The OpenAPI document: operation ids, tags, security schemes, and the errors that each operation can answer with."""

import inspect
from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import Direction

from config.api.openapi.document import described, response_name
from config.api.serializers import camel
from config.kernel import money

ALWAYS = {400, 401, 406, 429, 431, 500, 503}
WITH_BODY = {413, 415}
BODY_METHODS = {"POST", "PUT", "PATCH"}


class BearerScheme(OpenApiAuthenticationExtension):
    target_class = "config.api.authentication.BearerAuthentication"
    match_subclasses = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.target.scheme

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": self.target.bearer_format,
            "description": self.target.description,
        }


class CreditsNumber(OpenApiSerializerFieldExtension):
    target_class = "config.api.serializers.CreditsNumberField"

    def map_serializer_field(self, auto_schema: Any, direction: Direction) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if direction == "request":
            schema["description"] = "Credits, with up to 6 decimals."
            schema["maximum"] = money.MAX_MICRO // money.MICRO
            if self.target.minimum is not None:
                schema["minimum"] = self.target.minimum / money.MICRO
        return schema


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

    def get_operation_id(self) -> str:
        """``sessionRunsCancel``: surface, path, action."""
        words = [token.replace("-", "_") for token in self._tokenize_path()]
        action = getattr(self.view, "action", None) or self.method.lower()
        if not words or not words[-1].endswith(action):
            words.append(action)
        surface = getattr(self.view, "surface", "service")
        return camel("_".join(["session" if surface == "server" else surface, *words]))

    def get_description(self) -> str:  # type: ignore[override]
        """The action's own docstring; never its class's, which is for readers of the code."""
        action = getattr(self.view, getattr(self.view, "action", None) or self.method.lower(), None)
        return inspect.cleandoc(action.__doc__ or "") if inspect.ismethod(action) else ""

    def get_tags(self) -> list[str]:
        """The first word of the path, unless the view names another tag."""
        tag = getattr(self.view, "tag", None)
        return [tag] if tag else super().get_tags()

    def get_override_parameters(self) -> list[Any]:
        declared = getattr(self.view, "query_parameters", {}).get(getattr(self.view, "action", None), [])
        return [*declared, *super().get_override_parameters()]

    def get_auth(self) -> list[dict[str, Any]]:
        scope = self._required_scope()
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
            schema = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}
            text = described("parameters")["Idempotency-Key"]
            parameters.append({"in": "header", "name": "Idempotency-Key", "description": text, "schema": schema})
        return parameters

    def _get_response_bodies(self, direction: Direction = "response") -> dict[str, Any]:
        responses = super()._get_response_bodies(direction)
        for status in sorted(self.error_statuses()):
            responses.setdefault(str(status), {"$ref": f"#/components/responses/{response_name(status)}"})
        return responses

    def error_statuses(self) -> set[int]:
        view: Any = self.view
        statuses = set(ALWAYS)
        if self.method in BODY_METHODS:
            statuses |= WITH_BODY
        if "{" in self.path:
            statuses.add(404)
        if self._is_idempotent():
            statuses.add(409)
        if self._required_scope():
            statuses.add(403)
        declared = view.error_statuses.get(view.action, ())
        return (statuses | {status for status in declared if status > 0}) - {-status for status in declared}

    def _required_scope(self) -> str:
        view: Any = self.view
        return view.required_scope() if hasattr(view, "surface") else ""

    def _is_idempotent(self) -> bool:
        return self.method == "POST" and getattr(self.view, "action", None) in getattr(
            self.view, "idempotent_actions", ()
        )
