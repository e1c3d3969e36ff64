"""The kinds of entries of the catalogue file: what an entry may contain, and how its row is found, stored and exported.
A new field is a name in ``Meta.fields``; its default is that of the model. In secrets and addresses, ``${VARIABLE}``
stands for the value of an environment variable.
"""

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, partial
from glob import escape
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias
from urllib.parse import urlsplit

from django.core.validators import RegexValidator
from django.db import models
from django.db.models import F, QuerySet
from rest_framework import serializers

from config.api.serializers import CamelSerializer, CreditsNumberField, StrictBooleanField, StrictNumberField, camel
from config.kernel.encryption import LOST
from config.kernel.jsontext import same_json
from runs.catalogue import agents, rules
from runs.catalogue.definitions import KINDS, check_dialect, check_parameters
from runs.catalogue.rules import OPTIONAL, VARIABLE, Address, Headers, Object, OneOf, Secret, Text, fits, variables_of
from runs.catalogue.yaml import Path
from runs.models import RESERVED_TOOL_NAMES, Agent, AgentModel, AgentVersion, Provider, Tool
from runs.tools import builtin
from runs.tools.base import BUILTIN, CLIENT, PARK_SECONDS, parse_headers, parse_signing_secret
from runs.tools.dispatch import TYPES
from runs.tools.schema import check_schema
from webhooks import services
from webhooks.models import Endpoint

# Base64; hexadecimal digits are a special case of it.
ENDPOINT_SECRET = re.compile(r"\A(?:[A-Za-z0-9+/]{4}){7,31}[A-Za-z0-9+/]{2}(?:[A-Za-z0-9+/]{2}|[A-Za-z0-9+/]=|==)\Z")
# JSON columns in which the order of keys matters, and in which 1 differs from true.
EXACT = {"parameters", "input_schema", "output_schema"}
# An entry of the file: its path in the file, and the columns that it sets.
Given: TypeAlias = tuple[Path, dict[str, Any]]

_price = partial(CreditsNumberField, minimum=0)


def new_variable(names: list[str], *parts: str) -> str:
    """``${NAME}`` of a new variable, named after ``parts``. The name is added to ``names``, and unique there."""
    base = name = "_".join(re.sub(r"[^A-Z0-9]+", "_", part.upper()).strip("_") for part in parts)
    while name in names:
        name = f"{base}_{int(name.removeprefix(base)[1:] or 1) + 1}"
    names.append(name)
    return f"${{{name}}}"


class Entry(CamelSerializer, serializers.ModelSerializer):
    """One entry of the file. Its value is a dict of the columns that the file sets. Possible secrets are write-only."""

    serializer_field_mapping: ClassVar = {
        models.CharField: Text,
        models.TextField: Text,
        models.BooleanField: StrictBooleanField,
        models.PositiveIntegerField: rules.Whole,
        models.FloatField: StrictNumberField,
    }
    serializer_choice_field = OneOf
    default_error_messages: ClassVar = {"invalid": "It must be a mapping."}
    # The columns of addresses that may have variables. A column ``…_source`` stores the file's text of the address.
    addresses: ClassVar[tuple[str, ...]] = ()
    prefix: ClassVar[str] = ""  # the prefix of the names of variables
    queryset: QuerySet[Any]
    is_list: ClassVar = True  # whether the file has a list of these entries, or one entry without a name
    Meta: Any

    @cached_property
    def secrets(self) -> dict[str, serializers.Field]:
        """The write-only fields by column."""
        return {str(field.source): field for field in self.fields.values() if field.write_only}

    @cached_property
    def kept(self) -> set[str]:
        """The fields that stay as they are if the file leaves them out."""
        return {str(field.field_name) for field in self.secrets.values()} | {"isDefault"}

    def get_extra_kwargs(self) -> dict[str, Any]:
        """Without DRF's checks that values are new: an entry with the name of a row changes that row."""
        unchecked: dict[str, Any] = {"validators": []}
        return {"name": unchecked, "is_default": unchecked, "display_name": {"required": False}}

    def rows(self) -> dict[str, Any]:
        return {row.name: row for row in self.queryset.order_by("name")}

    def blank(self, name: str, node_type: str) -> Any:
        return self.Meta.model()

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """The row as in the file, without fields that may be secret."""
        found = serializers.ModelSerializer.to_representation(self, instance)
        return found | {camel(column): self.address(instance, column) for column in self.addresses}

    def address(self, row: Any, column: str) -> str:
        """The address, or the text with variables from which it was made. The text is used if the stored address still
        matches it, with any values of the variables; otherwise staff have written another address since.
        """
        url, source = getattr(row, column), getattr(row, f"{column}_source")
        pattern = VARIABLE.sub(lambda found: "${" if found[1] is None else "*", escape(source))
        return str(source if source and fnmatchcase(url, pattern) else url.replace("${", "$${"))

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The default values, as in the file, of the fields that an entry may leave out."""
        name = given.get("name")
        shown = self.to_representation(self.blank(name if isinstance(name, str) else "", given.get("nodeType", "")))
        required = {name for name, field in self.fields.items() if field.required} | {"displayName"}
        return {
            name: value
            for name, value in shown.items()
            if name not in {*self.kept, "name", "nodeType"} and not (name in required and value in (None, ""))
        }

    def run_validation(self, data: Any = serializers.empty) -> Any:
        if not isinstance(data, Mapping):
            self.fail("invalid")
        given = {name: value for name, value in data.items() if value is not None or name in self.kept}
        values = super().run_validation(self.defaults(given) | given)
        for column in self.addresses:
            text = given.get(camel(column), "")
            values[f"{column}_source"] = text if variables_of(text) else ""
        return values

    def validate_name(self, name: str) -> str:
        if name != name.strip():
            raise serializers.ValidationError("It begins or ends with a blank.")
        return name

    def complete(self, entries: dict[str, Given], rows: dict[str, Any], wrong: Callable[..., None]) -> None:
        """Report mistakes that a single entry does not show to ``wrong``. Replace names of other rows by the rows."""

    def differs(self, row: Any, column: str, value: Any) -> bool:
        before = getattr(row, column)
        return not same_json(before, value) if column in EXACT else bool(before != value)

    def store(self, row: Any, values: dict[str, Any], is_new: bool, changed: Collection[str]) -> None:
        """Store a row whose columns ``changed``. Raises ValidationError."""
        row.save(force_insert=is_new, update_fields=None if is_new else changed)

    def disable(self, name: str) -> None:
        self.queryset.filter(name=name).update(enabled=False)

    def written(self, row: Any, rows: dict[str, Any], variables: list[str]) -> dict[str, Any]:
        """The entry of this row in an export. Adds the names of its variables to ``variables``."""
        shown = self.to_representation(row)
        defaults = self.defaults(shown)
        found = {
            name: value
            for name, value in shown.items()
            if (value if name in self.kept else name not in defaults or not same_json(value, defaults[name]))
        }
        for name, field in self.fields.items():
            new = variables_of(found.get(name, "")) if isinstance(field, Address) else ()
            variables += [variable for variable in dict.fromkeys(new) if variable not in variables]
        prefix = [self.prefix, row.name] if self.is_list else [self.prefix]
        for column, field in self.secrets.items():
            value = getattr(row, column)
            if isinstance(field, Headers) and value:
                if value == LOST:
                    raise ValueError(f"No key of ENCRYPTION_KEYS decrypts the headers of {row.name}.")
                names = parse_headers(value)
                found["headers"] = {name: new_variable(variables, *prefix, "HEADER", name) for name in names}
            elif value or not self.is_list:  # an endpoint has a secret, even if no key decrypts it
                found[str(field.field_name)] = new_variable(variables, *prefix, column)
        return {name: found[name] for name, _ in self.fields.items() if name in found}


class ProviderEntry(Entry):
    kind = OneOf(list(KINDS))
    base_url = Address(required=False, allow_blank=True)
    api_key = Secret(max_length=rules.API_KEY_MAX_CHARS)
    headers = Headers(max_length=rules.HEADERS_MAX_CHARS)
    addresses = ("base_url",)
    prefix = "PROVIDER"
    queryset = Provider.objects.all()

    class Meta:
        model = Provider
        fields = ("name", "kind", "base_url", "api_key", "headers", "max_concurrent", "requests_per_minute", "enabled")


class ModelEntry(Entry):
    provider = Text()
    input_price = _price(source="price_in")
    output_price = _price(source="price_out")
    cached_input_price = _price(source="price_cached_in", **OPTIONAL)
    cache_write_price = _price(source="price_cache_write", **OPTIONAL)
    parameters = Object(validators=[fits(check_parameters)])
    dialect = Object(validators=[fits(check_dialect)])
    fallbacks = rules.Names(required=False, max_length=rules.FALLBACKS_MAX)
    queryset = AgentModel.objects.select_related("provider")

    class Meta:
        model = AgentModel
        fields = (
            *("name", "display_name", "provider", "provider_model", "input_price", "output_price"),
            *("cached_input_price", "cache_write_price", "provider_cost_percent", "context_tokens"),
            *("max_output_tokens", "parameters", "dialect", "fallbacks", "is_default", "enabled"),
        )

    def blank(self, name: str, node_type: str) -> Any:
        return AgentModel(display_name=name, provider=Provider())

    def complete(self, entries: dict[str, Given], rows: dict[str, Any], wrong: Callable[..., None]) -> None:
        providers = Provider.objects.in_bulk(field_name="name")
        defaults = [name for name, (_, values) in entries.items() if values.get("is_default")]
        for name, (path, values) in entries.items():
            others = (rows.keys() | entries.keys()) - {name}
            if problem := rules.problem_of_names(values["fallbacks"], others, rules.FALLBACKS_MAX, "other model"):
                wrong((*path, "fallbacks"), problem)
            if values["provider"] not in providers:
                wrong((*path, "provider"), f"There is no provider named {values['provider'][:100]}.")
            values["provider"] = providers.get(values["provider"])
            if name in defaults[1:]:
                wrong((*path, "isDefault"), f"Only one model can be the default; models.{defaults[0]} is.")

    def written(self, row: Any, rows: dict[str, Any], variables: list[str]) -> dict[str, Any]:
        row.fallbacks = [name for name in row.fallbacks if name in rows]  # a fallback may have been deleted
        return super().written(row, rows, variables)


class ToolEntry(Entry):
    node_type = OneOf(list(TYPES))
    url = Address(required=False, allow_blank=True)
    input_schema = Object(validators=[fits(check_schema)])
    price = _price()
    timeout_seconds = StrictNumberField(min_value=rules.TIMEOUT[0], max_value=rules.TIMEOUT[1], **OPTIONAL)
    headers = Headers(max_length=rules.HEADERS_MAX_CHARS, source="secret_headers")
    signing_secret = Secret(max_length=rules.SIGNING_SECRET_MAX_CHARS, validators=[fits(parse_signing_secret)])
    park_seconds = rules.Whole(min_value=PARK_SECONDS[0], max_value=PARK_SECONDS[-1], **OPTIONAL)
    cancel_url = Address(required=False, allow_blank=True)
    addresses = ("url", "cancel_url")
    prefix = "TOOL"
    queryset = Tool.objects.all()

    class Meta:
        model = Tool
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
    """The columns of an agent and of its version. ``agents.save`` has the other rules, and stores a new version."""

    name = Text()
    display_name = Text(required=False)
    description = Text(required=False, allow_blank=True)
    tools = rules.Names(max_length=agents.TOOLS_MAX, **OPTIONAL)
    parameters = Object()
    credit_approval_threshold = _price(**OPTIONAL)
    max_credits = CreditsNumberField(minimum=1, **OPTIONAL)
    output_schema = Object(**OPTIONAL)
    enabled = StrictBooleanField(required=False)
    queryset = Agent.objects.all()

    class Meta:
        model = AgentVersion
        fields = (
            *("name", "display_name", "description", "instructions", "model", "tools", "parameters"),
            *("credit_approval_threshold", "max_credits", "on_credits_exhausted", "output_schema", "enabled"),
        )

    def rows(self) -> dict[str, Any]:
        current = {row.agent_id: row for row in AgentVersion.objects.filter(number=F("agent__version"))}
        return {name: self._row(agent, current.get(agent.pk)) for name, agent in super().rows().items()}

    def blank(self, name: str, node_type: str) -> Any:
        return self._row(Agent(display_name=name), None)

    def _row(self, agent: Agent, version: AgentVersion | None) -> Any:
        content = {column: getattr(version, column, default) for column, default in agents.CONTENT.items()}
        shown = {column: getattr(agent, column) for column in ("name", "display_name", "description", "enabled")}
        return SimpleNamespace(**shown, **content)

    def differs(self, row: Any, column: str, value: Any) -> bool:
        return agents.differs(row, column, value)

    def store(self, row: Any, values: dict[str, Any], is_new: bool, changed: Collection[str]) -> None:
        try:
            agents.save(**values)
        except serializers.ValidationError as error:
            problems: Any = error.detail
            raise serializers.ValidationError({camel(column): problems[column] for column in problems}) from None

    def written(self, row: Any, rows: dict[str, Any], variables: list[str]) -> dict[str, Any]:
        known = set(Tool.objects.values_list("name", flat=True))  # a tool may have been deleted
        row.tools = None if row.tools is None else [tool for tool in row.tools if tool in known]
        return super().written(row, rows, variables)


class EndpointEntry(Entry):
    url = Address()
    secret = Secret(
        validators=[RegexValidator(ENDPOINT_SECRET, "Use 64 hexadecimal digits, such as openssl rand -hex 32 prints.")]
    )
    prefix = "INSTALLATION_ENDPOINT"
    is_list = False

    class Meta:
        model = Endpoint
        fields = ("url", "secret", "enabled")

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """The part after the host is written as a variable: many receivers use it as the credential."""
        found, parts = super().to_representation(instance), urlsplit(instance.url)
        if parts.path not in ("", "/") or parts.query:
            host = f"{parts.scheme}://{parts.netloc}".replace("${", "$${")
            found["url"] = f"{host}/${{INSTALLATION_ENDPOINT_PATH}}"
        return found

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Resolves the host of a new address on the network."""
        endpoint = self.rows().get("")
        if not values.get("secret") and (endpoint is None or "secret" in values):
            raise serializers.ValidationError({"secret": ["This field is required."]})
        if endpoint is None or endpoint.url != values["url"]:
            services.check_url(values["url"])
        return values

    def rows(self) -> dict[str, Any]:
        endpoint = services.endpoints_of(services.INSTALLATION).first()
        return {} if endpoint is None else {"": endpoint}

    def store(self, row: Any, values: dict[str, Any], is_new: bool, changed: Collection[str]) -> None:
        if {"url", "secret"} & set(changed):
            secret = values["secret"] if "secret" in changed else None
            services.register(services.INSTALLATION, row.url, rotate=secret is not None, extended=True, secret=secret)
        services.change(services.INSTALLATION, enabled=row.enabled)

    def disable(self, name: str) -> None:
        services.change(services.INSTALLATION, enabled=False)


# Ordered so that entries only refer to entries of kinds before them.
ENTRIES: dict[str, Entry] = {
    "providers": ProviderEntry(),
    "models": ModelEntry(),
    "tools": ToolEntry(),
    "agents": AgentEntry(),
    "installationEndpoint": EndpointEntry(),
}
