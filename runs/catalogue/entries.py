"""The entries of the catalogue file: a serializer for each table. A new field is a name in ``Meta.fields``; its default
is that of the model. ``${VARIABLE}`` stands for a value of the environment in secrets and addresses.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from django.db import models
from rest_framework import serializers

from config.api.serializers import (
    BoundedListField,
    CamelSerializer,
    CreditsNumberField,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
)
from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import to_text
from runs.catalogue import agents, rules
from runs.catalogue.dialects import check_dialect
from runs.catalogue.output import check_output_schema
from runs.catalogue.parameters import check_parameters
from runs.catalogue.providers import KINDS
from runs.models import RESERVED_TOOL_NAMES, AgentModel, AgentVersion, Provider, Tool
from runs.tools import builtin
from runs.tools.base import BUILTIN, is_address, parse_headers, parse_signing_secret
from runs.tools.dispatch import TYPES
from runs.tools.schema import check_schema
from webhooks import services
from webhooks.models import Endpoint, opened

T = TypeVar("T")
VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
# What the columns of both databases hold.
WHOLE_MAX = 2**31 - 1
ENDPOINT_SECRET_CHARS = range(32, 129)
# What a built-in tool says itself.
OWN = ("displayName", "description", "inputSchema", "price", "approval", "repeatable")
OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True}


def with_variables(text: str) -> str:
    """``text`` with each ``${NAME}`` replaced from the environment; ``$${`` stands for ``${``. Raises ValueError."""
    return VARIABLE.sub(_variable, text)


def _variable(found: re.Match[str]) -> str:
    name = found[1]
    if name is None:
        return "${"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", name) or not found[0].endswith("}"):
        raise ValueError("Write ${VARIABLE}, or $${ for the text ${.")
    if not os.environ.get(name):
        raise ValueError(f"The environment has no variable {name}, or it is empty.")
    return os.environ[name]


def checked(check: Callable[[Any], T], value: Any) -> T:
    """``check(value)``, with its ValueError as a mistake of the field."""
    try:
        return check(value)
    except ValueError as error:
        raise serializers.ValidationError(str(error)) from None


class Text(StrictCharField):
    default_error_messages: ClassVar = {"invalid": "A text is required. Put it in quotes."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"trim_whitespace": False} | kwargs)


class Address(Text):
    def to_internal_value(self, data: Any) -> str:
        url = checked(with_variables, super().to_internal_value(data))
        if url and not is_address(url):
            raise serializers.ValidationError(rules.NO_ADDRESS)
        return url

    def to_representation(self, value: str) -> str:
        return value.replace("${", "$${")


class Secret(Text):
    """A secret that the file leaves out stays; ``null`` and an empty one remove it."""

    def __init__(self, check: Callable[[str], Any] = str, **kwargs: Any) -> None:
        self.check = check
        super().__init__(**OPTIONAL | {"write_only": True, "allow_blank": True} | kwargs)

    def run_validation(self, data: Any = serializers.empty) -> Any:
        return super().run_validation(data) or None

    def to_internal_value(self, data: Any) -> str:
        value = checked(with_variables, super().to_internal_value(data)).strip()
        checked(self.check, value)
        return value

    def same(self, before: str | None, after: str | None) -> bool:
        return before == after


class Headers(Secret):
    """A mapping of names to secret values, as JSON text."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A mapping of header names to values is required.")
        found, wrong = {}, {}
        for name, value in data.items():
            try:
                found[name] = checked(with_variables, StrictCharField.to_internal_value(self, value))
                checked(parse_headers, to_text({name: found[name]}))
            except serializers.ValidationError as error:
                wrong[name] = error.detail
        if wrong:
            raise serializers.ValidationError(wrong)
        return to_text(found) if found else ""

    def same(self, before: str | None, after: str | None) -> bool:
        try:
            return parse_headers(before) == parse_headers(after)
        except ValueError:
            return False


class Whole(StrictIntegerField):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"max_value": WHOLE_MAX})


class Number(serializers.FloatField):
    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, Decimal)):
            self.fail("invalid")
        return float(data)

    def to_representation(self, value: float) -> Any:
        return int(value) if value.is_integer() else value


class OneOf(serializers.ChoiceField):
    def __init__(self, choices: Any, **kwargs: Any) -> None:
        super().__init__(choices, **kwargs)
        self.error_messages["invalid_choice"] = f"Use one of {', '.join(self.choices)}."


class Object(serializers.Field):
    """A JSON object that ``check`` accepts."""

    def __init__(self, check: Callable[[Any], Any], **kwargs: Any) -> None:
        self.check = check
        super().__init__(**{"required": False} | kwargs)

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A mapping is required.")
        checked(self.check, data)
        return data

    def to_representation(self, value: Any) -> Any:
        return value


class Names(BoundedListField):
    child = Text()


_price = partial(CreditsNumberField, minimum=0)


class Entry(CamelSerializer, serializers.ModelSerializer):
    """One row of the file. The validated value is its columns; a column that is kept is not among them."""

    serializer_field_mapping: ClassVar = {
        models.CharField: Text,
        models.TextField: Text,
        models.BooleanField: StrictBooleanField,
        models.PositiveIntegerField: Whole,
        models.FloatField: Number,
    }
    serializer_choice_field = OneOf
    default_error_messages: ClassVar = {"invalid": "It must be a mapping."}
    # Fields that stay as they are if the file leaves them out.
    kept: ClassVar[frozenset[str]] = frozenset()
    # The columns for the file's own text of an address, if it contains a variable.
    templates: ClassVar[dict[str, str]] = {}

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """As DRF does it, without what may be written only."""
        return serializers.ModelSerializer.to_representation(self, instance)

    def build_standard_field(self, field_name: str, model_field: Any) -> Any:
        """Without a query for other rows with the same name: those are changed."""
        built, kwargs = super().build_standard_field(field_name, model_field)
        return built, {name: value for name, value in kwargs.items() if name != "validators"}

    @classmethod
    @cache
    def _defaults(cls) -> dict[str, Any]:
        found = {}
        for name, field in cls().fields.items():
            if field.required or field.write_only or name in cls.kept:
                continue
            default = field.default
            if default is serializers.empty:
                meta: Any = cls.Meta
                default = meta.model._meta.get_field(field.source).get_default()
            found[name] = None if default is None else field.to_representation(default)
        return found

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values, as in the file, of the fields that an entry may leave out."""
        found = dict(cls._defaults())
        if "displayName" in found:
            del found["displayName"]
            found |= {"displayName": given["name"]} if isinstance(given.get("name"), str) else {}
        return found

    def run_validation(self, data: Any = serializers.empty) -> Any:
        if not isinstance(data, Mapping):
            self.fail("invalid")
        secrets = {name for name, field in self.fields.items() if field.write_only}
        given = {name: value for name, value in data.items() if value is not None or name in secrets}
        values = super().run_validation(self.defaults(given) | given)
        for name, column in self.templates.items():
            found = VARIABLE.finditer(given.get(name, ""))
            values[column] = given[name] if any(match[1] is not None for match in found) else ""
        return values

    def validate_name(self, name: str) -> str:
        if name != name.strip():
            raise serializers.ValidationError("It begins or ends with a blank.")
        return name


class ProviderEntry(Entry):
    kind = OneOf(list(KINDS))
    base_url = Address(required=False, allow_blank=True)
    api_key = Secret(max_length=rules.API_KEY_MAX_CHARS)
    headers = Headers(max_length=rules.HEADERS_MAX_CHARS)
    templates: ClassVar = {"baseUrl": "base_url_source"}

    class Meta:
        model = Provider
        fields = (
            *("name", "kind", "base_url", "api_key", "headers", "max_concurrent", "requests_per_minute", "enabled"),
        )


class ModelEntry(Entry):
    provider = Text()
    input_price = _price(source="price_in")
    output_price = _price(source="price_out")
    cached_input_price = _price(source="price_cached_in", **OPTIONAL)
    cache_write_price = _price(source="price_cache_write", **OPTIONAL)
    parameters = Object(check_parameters)
    dialect = Object(check_dialect)
    fallbacks = Names(required=False, max_length=rules.FALLBACKS_MAX)
    kept: ClassVar = frozenset({"isDefault"})

    class Meta:
        model = AgentModel
        extra_kwargs: ClassVar = {"display_name": {"required": False}}
        fields = (
            *("name", "display_name", "provider", "provider_model", "input_price", "output_price"),
            *("cached_input_price", "cache_write_price", "provider_cost_percent", "context_tokens"),
            *("max_output_tokens", "parameters", "dialect", "fallbacks", "is_default", "enabled"),
        )


class ToolEntry(Entry):
    node_type = OneOf(list(TYPES))
    url = Address(required=False, allow_blank=True)
    input_schema = Object(check_schema)
    price = _price()
    timeout_seconds = Number(min_value=rules.TIMEOUT_MIN_SECONDS, max_value=rules.TIMEOUT_MAX_SECONDS, **OPTIONAL)
    headers = Headers(max_length=rules.HEADERS_MAX_CHARS, source="secret_headers")
    signing_secret = Secret(parse_signing_secret, max_length=rules.SIGNING_SECRET_MAX_CHARS)
    templates: ClassVar = {"url": "url_source"}

    class Meta:
        model = Tool
        extra_kwargs: ClassVar = {"display_name": {"required": False}}
        fields = (
            *("name", "display_name", "description", "node_type", "url", "remote_name", "input_schema", "price"),
            *("provider_cost_percent", "approval", "timeout_seconds", "repeatable", "headers", "signing_secret"),
            "enabled",
        )

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Of a built-in tool, its own values."""
        found = super().defaults(given)
        tool = builtin.TOOLS.get(given["name"]) if isinstance(given.get("name"), str) else None
        if tool is None or given.get("nodeType") != BUILTIN:
            return found
        own = cls(Tool(**tool.row())).data
        return found | {name: own[name] for name in OWN}

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        if values["name"] in RESERVED_TOOL_NAMES:
            raise serializers.ValidationError(f"No tool can be named {' or '.join(RESERVED_TOOL_NAMES)}.")
        given = {column: values[column] for column in ("name", "node_type", "url")}
        names = {field.source: name for name, field in self.fields.items()}
        if problems := rules.problems_of_tool(**given):
            raise serializers.ValidationError({names[column]: [problem] for column, problem in problems.items()})
        return values


class AgentEntry(Entry):
    """The columns of an agent and of its version. ``agents.save`` has the other rules."""

    name = Text()
    display_name = Text(required=False, default="")
    description = Text(default="", allow_blank=True)
    tools = Names(max_length=agents.TOOLS_MAX, **OPTIONAL)
    parameters = Object(check_parameters)
    credit_approval_threshold = _price(**OPTIONAL)
    max_credits = CreditsNumberField(minimum=1, **OPTIONAL)
    output_schema = Object(check_output_schema, allow_null=True)
    enabled = StrictBooleanField(default=True)

    class Meta:
        model = AgentVersion
        fields = (
            *("name", "display_name", "description", "instructions", "model", "tools", "parameters"),
            *("credit_approval_threshold", "max_credits", "output_schema", "enabled"),
        )

    def validate_name(self, name: str) -> str:
        return name


class EndpointEntry(Entry):
    url = Address()
    secret = Secret(max_length=ENDPOINT_SECRET_CHARS[-1])

    class Meta:
        model = Endpoint
        fields = ("url", "secret", "enabled")

    def validate_secret(self, secret: str | None) -> str | None:
        try:
            fits = not secret or (len(secret) in ENDPOINT_SECRET_CHARS and base64.b64decode(secret, validate=True))
        except ValueError:
            fits = False
        if not fits:
            raise serializers.ValidationError("Use 64 hexadecimal digits, such as openssl rand -hex 32 prints.")
        return secret

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Looks a new address up on the network."""
        endpoint = opened(services.endpoints_of(services.INSTALLATION))
        if not values.get("secret") and (endpoint is None or "secret" in values):
            raise serializers.ValidationError({"secret": ["This field is required."]})
        if endpoint is None or endpoint.url != values["url"]:
            try:
                services.check_url(values["url"])
            except ValidationFailed as error:
                raise serializers.ValidationError((error.details or {})["fields"]) from None
        return values
