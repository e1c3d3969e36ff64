"""The kinds of entries of the catalogue file: what an entry may say, and how its row is found, compared, stored and
written. A new field is a name in ``Meta.fields``; its default is that of the model. ``${VARIABLE}`` stands for a value
of the environment in secrets and addresses.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from django.db.models import F
from rest_framework import serializers

from config.api.serializers import CreditsNumberField, StrictBooleanField, StrictNumberField, camel
from config.kernel.errors import ValidationFailed
from runs.catalogue import agents, rules
from runs.catalogue.dialects import check_dialect
from runs.catalogue.entry import Entry, Given, Variables
from runs.catalogue.fields import (
    OPTIONAL,
    Address,
    Headers,
    Names,
    Object,
    OneOf,
    Secret,
    Text,
    Whole,
    by,
)
from runs.catalogue.parameters import check_parameters
from runs.catalogue.providers import KINDS
from runs.models import RESERVED_TOOL_NAMES, Agent, AgentModel, AgentVersion, Provider, Tool
from runs.tools import builtin
from runs.tools.base import BUILTIN, CLIENT, PARK_SECONDS, parse_signing_secret
from runs.tools.dispatch import TYPES
from runs.tools.schema import check_schema
from webhooks import services
from webhooks.models import Endpoint

ENDPOINT_SECRET_CHARS = range(32, 129)

_price = partial(CreditsNumberField, minimum=0)


class ProviderEntry(Entry):
    kind = OneOf(list(KINDS))
    base_url = Address(required=False, allow_blank=True)
    api_key = Secret(max_length=rules.API_KEY_MAX_CHARS)
    headers = Headers(max_length=rules.HEADERS_MAX_CHARS)
    addresses = ("base_url",)
    prefix = "PROVIDER"
    queryset = Provider.objects.defer("api_key", "headers")

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
    parameters = Object(**by(check_parameters))
    dialect = Object(**by(check_dialect))
    fallbacks = Names(required=False, max_length=rules.FALLBACKS_MAX)
    queryset = AgentModel.objects.select_related("provider").defer("provider__api_key", "provider__headers")

    class Meta:
        model = AgentModel
        extra_kwargs: ClassVar = {"display_name": {"required": False}}
        fields = (
            *("name", "display_name", "provider", "provider_model", "input_price", "output_price"),
            *("cached_input_price", "cache_write_price", "provider_cost_percent", "context_tokens"),
            *("max_output_tokens", "parameters", "dialect", "fallbacks", "is_default", "enabled"),
        )

    def blank(self, name: str, node_type: str) -> Any:
        return AgentModel(display_name=name, provider=Provider())

    def complete(self, entries: dict[str, Given], rows: dict[str, Any], wrong: Callable[..., None]) -> None:
        providers = Provider.objects.defer("api_key", "headers").in_bulk(field_name="name")
        known = rows.keys() | entries.keys()
        defaults = [name for name, given in entries.items() if given.values.get("is_default")]
        for name, given in entries.items():
            if problem := rules.problem_of_fallbacks(given.values["fallbacks"], known - {name}):
                wrong((*given.path, "fallbacks"), problem)
            provider = given.values["provider"]
            given.values["provider"] = providers.get(provider)
            if provider not in providers:
                wrong((*given.path, "provider"), f"There is no provider named {provider[:100]}.")
            if name in defaults[1:]:
                wrong((*given.path, "isDefault"), f"Only one model can be the default; models.{defaults[0]} is.")
        for name, row in rows.items():
            if defaults and row.is_default and name != defaults[0]:
                entries.setdefault(name, Given((), {})).values["is_default"] = False

    def written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        # A fallback may have been deleted.
        row.fallbacks = [name for name in row.fallbacks if name in rows]
        found = super().written(row, rows, variables)
        # Without this, the default model of the other installation would stay.
        return found if any(other.is_default for other in rows.values()) else found | {"isDefault": False}


class ToolEntry(Entry):
    node_type = OneOf(list(TYPES))
    url = Address(required=False, allow_blank=True)
    input_schema = Object(**by(check_schema))
    price = _price()
    timeout_seconds = StrictNumberField(
        min_value=rules.TIMEOUT_MIN_SECONDS, max_value=rules.TIMEOUT_MAX_SECONDS, **OPTIONAL
    )
    headers = Headers(max_length=rules.HEADERS_MAX_CHARS, source="secret_headers")
    signing_secret = Secret(max_length=rules.SIGNING_SECRET_MAX_CHARS, **by(parse_signing_secret))
    park_seconds = Whole(min_value=PARK_SECONDS[0], max_value=PARK_SECONDS[-1], **OPTIONAL)
    cancel_url = Address(required=False, allow_blank=True)
    addresses = ("url", "cancel_url")
    prefix = "TOOL"
    queryset = Tool.objects.defer("secret_headers", "signing_secret")

    class Meta:
        model = Tool
        extra_kwargs: ClassVar = {"display_name": {"required": False}}
        fields = (
            *("name", "display_name", "description", "node_type", "url", "remote_name", "input_schema", "price"),
            *("provider_cost_percent", "approval", "timeout_seconds", "repeatable", "headers", "signing_secret"),
            *("park_seconds", "cancel_url", "unsigned_callbacks", "enabled"),
        )

    def blank(self, name: str, node_type: str) -> Any:
        own = builtin.TOOLS.get(name) if node_type == BUILTIN else None
        columns: dict[str, Any] = {"display_name": name} if own is None else own.row()
        return Tool(**columns | ({"price": 0} if node_type == CLIENT else {}))

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        if values["name"] in RESERVED_TOOL_NAMES:
            raise serializers.ValidationError(f"No tool can be named {' or '.join(RESERVED_TOOL_NAMES)}.")
        given = {column: values[column] for column in ("name", "node_type", "url", "cancel_url", "price")}
        if problems := rules.problems_of_tool(**given):
            raise serializers.ValidationError({camel(column): [told] for column, told in problems.items()})
        return values


class AgentEntry(Entry):
    """The columns of an agent and of its version. ``agents.save``, which makes a version of a change, has the other
    rules.
    """

    name = Text()
    display_name = Text(required=False)
    description = Text(required=False, allow_blank=True)
    tools = Names(max_length=agents.TOOLS_MAX, **OPTIONAL)
    parameters = Object()
    credit_approval_threshold = _price(**OPTIONAL)
    max_credits = CreditsNumberField(minimum=1, **OPTIONAL)
    output_schema = Object(allow_null=True)
    enabled = StrictBooleanField(required=False)

    class Meta:
        model = AgentVersion
        fields = (
            *("name", "display_name", "description", "instructions", "model", "tools", "parameters"),
            *("credit_approval_threshold", "max_credits", "on_credits_exhausted", "output_schema", "enabled"),
        )

    def rows(self) -> dict[str, Any]:
        """The agents with the columns of their current versions."""
        current = {row.agent_id: row for row in AgentVersion.objects.filter(number=F("agent__version"))}
        return {agent.name: self._row(agent, current.get(agent.pk)) for agent in Agent.objects.order_by("name")}

    def blank(self, name: str, node_type: str) -> Any:
        return self._row(Agent(display_name=name), None)

    def _row(self, agent: Agent, version: AgentVersion | None) -> Any:
        content = {column: getattr(version, column, default) for column, default in agents.CONTENT.items()}
        shown = {column: getattr(agent, column) for column in ("name", "display_name", "description", "enabled")}
        return SimpleNamespace(**shown, **content)

    def store(self, row: Any, given: Given, is_new: bool, changed: Collection[str]) -> bool:
        if not given.path:
            # Pruned, without a check of what no longer matters: its tools may have been deleted.
            return bool(Agent.objects.filter(name=row.name).update(enabled=False))
        try:
            # The order of an agent's tools, for example, is no change.
            return bool(agents.save(**given.values).changed)
        except agents.InvalidAgent as invalid:
            wrong = {camel(column): [problem] for column, problem in invalid.problems.items()}
            raise serializers.ValidationError(wrong) from None

    def written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        """What a version names may have been deleted; a file that names it could not be applied."""
        if row.tools is not None:
            known = set(Tool.objects.values_list("name", flat=True))
            row.tools = [tool for tool in row.tools if tool in known]
        if row.model is not None and not AgentModel.objects.filter(name=row.model).exists():
            gone = f"agents.{row.name} has no model in this file, because {row.model} was deleted"
            variables.notes.append(f"{gone}: it will use the default one.")
            row.model = None
        return super().written(row, rows, variables)


class EndpointEntry(Entry):
    """The path and the query of its address are not shown: for many receivers they are the credential."""

    url = Address()
    secret = Secret(max_length=ENDPOINT_SECRET_CHARS[-1])
    prefix = "INSTALLATION_ENDPOINT"
    is_list = False

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
        endpoint = self.rows().get("")
        if not values.get("secret") and (endpoint is None or "secret" in values):
            raise serializers.ValidationError({"secret": ["This field is required."]})
        if endpoint is None or endpoint.url != values["url"]:
            try:
                services.check_url(values["url"])
            except ValidationFailed as error:
                raise serializers.ValidationError((error.details or {})["fields"]) from None
        return values

    def rows(self) -> dict[str, Any]:
        endpoint = services.endpoints_of(services.INSTALLATION).first()
        return {} if endpoint is None else {"": endpoint}

    def store(self, row: Any, given: Given, is_new: bool, changed: Collection[str]) -> bool:
        if {"url", "secret"} & set(changed):
            secret = given.values["secret"] if "secret" in changed else None
            rotate = secret is not None
            services.register(services.INSTALLATION, row.url, rotate=rotate, extended=True, secret=secret)
        services.change(services.INSTALLATION, enabled=row.enabled)
        return True

    def source_of(self, row: Any, column: str) -> str:
        parts = urlsplit(row.url)
        if parts.path in ("", "/") and not parts.query:
            return ""
        return f"{parts.scheme}://{parts.netloc}".replace("${", "$${") + "/${INSTALLATION_ENDPOINT_PATH}"


# In the order in which they refer to each other.
ENTRIES: dict[str, Entry] = {
    "providers": ProviderEntry(),
    "models": ModelEntry(),
    "tools": ToolEntry(),
    "agents": AgentEntry(),
    "installationEndpoint": EndpointEntry(),
}
