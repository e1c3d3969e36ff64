"""The tables of providers, models and tools in the catalogue file: their fields, and how they refer to each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from config.kernel.jsontext import same_json
from config.kernel.yamltext import Node
from runs.catalogue import rules
from runs.catalogue.dialects import check_dialect
from runs.catalogue.file import fields
from runs.catalogue.file.base import Change, FieldChange, Variables, Work
from runs.catalogue.file.fields import ENABLED, KEPT, REQUIRED, Entry, Field
from runs.catalogue.file.rows import Rows
from runs.catalogue.parameters import check_parameters
from runs.catalogue.providers import KINDS, problem_of
from runs.models import PROVIDER_COST_MAX, AgentModel, Provider, Tool
from runs.tools import builtin
from runs.tools.base import BUILTIN, parse_signing_secret
from runs.tools.dispatch import TYPES
from runs.tools.schema import check_schema

# These rows are part of each installation, so a pruning file need not list them.
DEMO = "demo"


class Models(Rows):
    def rows(self) -> dict[str, Any]:
        found = super().rows()
        providers = {row.pk: row for row in Provider.objects.defer("api_key", "headers")}
        for row in found.values():
            row.provider = providers[row.provider_id]
        return found

    def read(self, node: Node, work: Work) -> dict[str, Entry]:
        found = super().read(node, work)
        defaults = [entry for entry in found.values() if entry.values.get("is_default")]
        for entry in defaults[1:]:
            self.note(entry, {"is_default": f"Only one model can be the default; {defaults[0].place} is."}, work)
        return found

    def resolve(self, entries: dict[str, Entry], rows: dict[str, Any], work: Work) -> None:
        providers = {row.name: row for row in Provider.objects.defer("api_key", "headers")}
        known = rows.keys() | entries.keys()
        for name, entry in entries.items():
            if problem := rules.problem_of_fallbacks(entry.values["fallbacks"], known - {name}):
                self.note(entry, {"fallbacks": problem}, work)
            provider = providers.get(entry.values["provider"])
            if provider is None:
                problem = f"There is no provider named {entry.values['provider'][:100]}."
                self.note(entry, {"provider": problem}, work)
            entry.values["provider"] = provider

    def complete(self, entries: dict[str, Entry], rows: dict[str, Any], changes: dict[str, Change]) -> None:
        chosen = next((name for name, entry in entries.items() if entry.values.get("is_default")), None)
        for name, row in rows.items():
            if chosen is not None and row.is_default and name != chosen:
                row.is_default = False
                change = changes.setdefault(name, Change(f"{self.name}.{name}"))
                change.fields.append(FieldChange("isDefault", True, False))

    def order(self, row: Any) -> int:
        # Two defaults would break a constraint.
        return int(row.is_default)

    def warn(self, rows: list[Any], work: Work) -> None:
        work.warnings += [
            f"{self.name}.{row.name} cannot be used: its provider {row.provider.name} is disabled."
            for row in rows
            if row.enabled and not row.provider.enabled
        ]

    def shown(self, field: Field, row: Any, rows: dict[str, Any]) -> Any:
        shown = super().shown(field, row, rows)
        # A fallback may have been deleted.
        return [name for name in shown if name in rows] if field.name == "fallbacks" else shown

    def _written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        written = super()._written(row, rows, variables)
        # Without this, the default model of the other installation would stay.
        return written if any(other.is_default for other in rows.values()) else written | {"isDefault": False}


class Providers(Rows):
    def warn(self, rows: list[Any], work: Work) -> None:
        for row in rows:
            if row.enabled and (problem := problem_of(row)):
                work.warnings.append(f"{self.name}.{row.name} cannot be used yet: {problem}")


def _own(column: str, otherwise: Any) -> Callable[[dict[str, Any]], Any]:
    """The default of a tool's field: a built-in tool's own value."""

    def default(values: dict[str, Any]) -> Any:
        tool = builtin.TOOLS.get(values.get("name", ""))
        if tool is not None and values.get("node_type") == BUILTIN:
            return tool.row()[column]
        return otherwise(values) if callable(otherwise) else otherwise

    return default


_address = partial(Field, read=fields.address, default="", show=fields.without_variables)
_object = partial(Field, default={}, show=fields.ordered, same=same_json)
_price = partial(Field, read=fields.amount(0), show=fields.optional_amount)
_PROVIDER_COST = Field(
    "providerCostPercent",
    "provider_cost_percent",
    fields.number(0, PROVIDER_COST_MAX),
    None,
    show=fields.plain_number,
)
_headers = partial(Field, "headers", read=fields.headers, default=KEPT, same=fields.same_headers, secret=True)

PROVIDERS = Providers(
    name="providers",
    model=Provider,
    variable="PROVIDER",
    fields=(
        Field("name", "name", fields.name),
        Field("kind", "kind", fields.choice(*KINDS)),
        _address("baseUrl", "base_url", source="base_url_source"),
        Field("apiKey", "api_key", fields.secret(rules.API_KEY_MAX_CHARS), KEPT, secret=True),
        _headers("headers"),
        Field("maxConcurrent", "max_concurrent", fields.whole, None),
        Field("requestsPerMinute", "requests_per_minute", fields.whole, None),
        ENABLED,
    ),
    stays=lambda row: row.name == DEMO,
)
MODELS = Models(
    name="models",
    model=AgentModel,
    variable="MODEL",
    fields=(
        Field("name", "name", fields.name),
        Field("displayName", "display_name", fields.text, fields.own_name),
        Field("provider", "provider", fields.text, show=lambda provider: provider.name),
        Field("providerModel", "provider_model", fields.text),
        _price("inputPrice", "price_in"),
        _price("outputPrice", "price_out"),
        _price("cachedInputPrice", "price_cached_in", default=None),
        _price("cacheWritePrice", "price_cache_write", default=None),
        _PROVIDER_COST,
        Field("contextTokens", "context_tokens", fields.whole, 128_000),
        Field("maxOutputTokens", "max_output_tokens", fields.whole, None),
        _object("parameters", "parameters", fields.mapping(check_parameters)),
        _object("dialect", "dialect", fields.mapping(check_dialect)),
        Field("fallbacks", "fallbacks", fields.names, []),
        Field("isDefault", "is_default", fields.flag, KEPT),
        ENABLED,
    ),
    stays=lambda row: row.name == DEMO,
    references=("provider",),
)
TOOLS = Rows(
    name="tools",
    model=Tool,
    variable="TOOL",
    fields=(
        Field("name", "name", fields.name),
        Field(
            "displayName",
            "display_name",
            fields.text,
            _own("display_name", fields.own_name),
        ),
        Field("description", "description", fields.text, _own("description", REQUIRED)),
        Field("nodeType", "node_type", fields.choice(*TYPES)),
        _address("url", "url", source="url_source"),
        Field("remoteName", "remote_name", fields.text, ""),
        _object("inputSchema", "input_schema", fields.mapping(check_schema), default=_own("input_schema", {})),
        _price("price", "price", default=_own("price", REQUIRED)),
        _PROVIDER_COST,
        Field("approval", "approval", fields.choice(*Tool.Approval.values), _own("approval", "threshold")),
        Field(
            "timeoutSeconds",
            "timeout_seconds",
            fields.number(rules.TIMEOUT_MIN_SECONDS, rules.TIMEOUT_MAX_SECONDS),
            None,
            show=fields.plain_number,
        ),
        Field("repeatable", "repeatable", fields.flag, _own("repeatable", False)),
        _headers("secret_headers"),
        Field(
            "signingSecret",
            "signing_secret",
            fields.secret(rules.SIGNING_SECRET_MAX_CHARS, parse_signing_secret),
            KEPT,
            secret=True,
        ),
        ENABLED,
    ),
    stays=lambda row: row.node_type == BUILTIN,
    check=lambda values: rules.problems_of_tool(**{column: values[column] for column in ("name", "node_type", "url")}),
)
