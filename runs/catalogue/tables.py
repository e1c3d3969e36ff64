"""The tables of the catalogue file: how each is read, compared with its rows, stored and written."""

from __future__ import annotations

from difflib import unified_diff
from fnmatch import fnmatchcase
from glob import escape
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from django.db.models import F
from rest_framework.exceptions import ValidationError

from config.kernel.encryption import DecryptionFailed
from config.kernel.jsontext import same_json, to_text
from config.outbound.urls import same_server
from runs.catalogue import agents, rules, yaml
from runs.catalogue.entries import (
    VARIABLE,
    AgentEntry,
    EndpointEntry,
    Entry,
    Headers,
    ModelEntry,
    ProviderEntry,
    Secret,
    ToolEntry,
)
from runs.catalogue.work import MISTAKES_MAX, Change, Given, Variables, Work
from runs.models import Agent, AgentModel, AgentVersion, Provider, Tool
from runs.tools.base import BUILTIN, parse_headers, shorten
from webhooks import services
from webhooks.models import opened

# A row that is part of each installation, so a pruning file need not list it.
DEMO = "demo"
ENDPOINT = "installationEndpoint"
SHOWN_MAX_CHARS = 300
# A secret that no key decrypts, and the value of a field that has none.
LOST, MISSING = object(), object()


def _secret_lines(name: str, was_set: bool, is_set: bool) -> list[str]:
    return [f"  {name}: {'removed' if not is_set else 'changed' if was_set else 'set'}"]


def _lines(name: str, before: Any, after: Any) -> list[str]:
    if before is MISSING:
        return [f"  {name}: {_shown(after)}"]
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        difference = list(unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))
        # The first two lines name files. JSON has no control characters, which would reach the terminal.
        return [f"  {name}:"] + [f"    {line[0]} {_shown(line[1:])[1:-1]}" for line in difference[2:] if line[0] != "@"]
    return [f"  {name}: {_shown(before)} → {_shown(after)}"]


def _shown(value: Any) -> str:
    return shorten(to_text(value), SHOWN_MAX_CHARS)


class Table:
    """A list of the file. Its rows are edited in place, but subclasses may store them otherwise."""

    # Fields that are not shown, as secrets are not.
    hidden: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, name: str, entry: type[Entry]) -> None:
        self.name, self.entry, self.form = name, entry, entry()
        meta: Any = entry.Meta
        self.model = meta.model

    def shown(self, row: Any) -> dict[str, Any]:
        """The row as the file has it, without secrets."""
        return dict(self.form.to_representation(row))

    def column(self, name: str) -> str:
        return str(self.form.fields[name].source)

    def secrets(self) -> dict[str, Secret]:
        return {name: field for name, field in self.form.fields.items() if isinstance(field, Secret)}

    def read(self, value: Any, work: Work) -> dict[str, Given]:
        """The valid entries by their names; the mistakes of the others."""
        found: dict[str, Given] = {}
        if not isinstance(value, list):
            work.wrong((self.name,), "A list is required; [] is the empty one.")
            return found
        for index, item in enumerate(value):
            if len(work.mistakes) > MISTAKES_MAX:
                break
            given = self.read_entry((self.name, index), item, work)
            if given is not None and given.values["name"] in found:
                work.wrong((*given.path, "name"), "The name is there twice.")
            elif given is not None:
                found[given.values["name"]] = given
        return found

    def read_entry(self, path: yaml.Path, item: Any, work: Work) -> Given | None:
        try:
            return Given(path, dict(self.entry.validated(item)))
        except ValidationError as error:
            work.wrong(path, error.detail)
            return None

    def rows(self) -> dict[str, Any]:
        """The rows by name, without their secrets: perhaps no key decrypts one."""
        hidden = [self.column(name) for name in self.secrets()]
        return {row.name: row for row in self.model._default_manager.defer(*hidden).order_by("name")}

    def new(self) -> Any:
        return self.model()

    def stays(self, row: Any) -> bool:
        """Whether a row survives a prune."""
        return bool(row.name == DEMO)

    def check(self, entries: dict[str, Given], rows: dict[str, Any], work: Work) -> None:
        """Note the mistakes that an entry alone does not show, and replace the names of other rows by the rows."""

    def complete(self, entries: dict[str, Given], rows: dict[str, Any]) -> None:
        """Add the changes that follow from others."""

    def save(self, row: Any, given: Given, change: Change, work: Work) -> bool:
        """Store a row; whether something changed."""
        row.save(force_insert=change.is_new)
        return True

    def apply(self, entries: dict[str, Given], work: Work) -> None:
        rows = self.rows()
        work.listed[self.name] = set(entries)
        self.check(entries, rows, work)
        work.stop()
        if work.prune:
            for name, row in rows.items():
                if name not in entries and row.enabled and not self.stays(row):
                    entries[name] = Given((), {"enabled": False})
        self.complete(entries, rows)
        # Two defaults would break a constraint.
        for name, given in sorted(entries.items(), key=lambda one: bool(one[1].values.get("is_default"))):
            row = rows.get(name)
            was_enabled = row is not None and row.enabled
            change, row = self.change(name, row, given)
            if (change.fields or change.is_new) and self.save(row, given, change, work):
                work.changes.append(change)
                if was_enabled and not row.enabled:
                    work.disabled[self.name].add(name)

    def change(self, name: str, row: Any, given: Given) -> tuple[Change, Any]:
        """How the row differs from the entry, and the row with the entry's values."""
        change = Change(f"{self.name}.{name}" if name else self.name, is_new=row is None)
        row = self.new() if row is None else row
        templates = self.entry.templates
        for address in () if change.is_new else map(self.column, templates):
            if address in given.values and not same_server(getattr(row, address), given.values[address]):
                # The stored secrets are for the stored address.
                given.values = {self.column(name): None for name in self.secrets()} | given.values
        before = {} if change.is_new else self.shown(row)
        sources = {name: self.template(row, name) for name in templates}
        secrets = {name: field for name, field in self.secrets().items() if self.column(name) in given.values}
        old = {name: None if change.is_new else self.secret(row, name) for name in secrets}
        for column, value in given.values.items():
            setattr(row, column, value)
        after = self.shown(row)
        before = self.entry.defaults(after) if change.is_new else before
        for name, shown in after.items():
            was = before.get(name, MISSING)
            source = self.template(row, name) if name in templates else ""
            if was is not MISSING and same_json(was, shown) and sources.get(name, "") == source:
                continue
            if name in self.hidden or source or sources.get(name):
                change.fields[name] = _secret_lines(name, not change.is_new, bool(shown))
            elif name != "name":
                change.fields[name] = _lines(name, MISSING if change.is_new else was, shown)
        for name, value in old.items():
            wanted = given.values[self.column(name)]
            if value is LOST or not secrets[name].same(value, wanted):
                change.fields[name] = _secret_lines(name, value is not None, bool(wanted))
        return change, row

    def secret(self, row: Any, name: str) -> Any:
        """LOST for a secret that no key decrypts."""
        try:
            return getattr(row, self.column(name))
        except DecryptionFailed:
            return LOST

    def template(self, row: Any, name: str) -> str:
        """The text with variables of which an address was made; empty if there is none.

        The address may have been changed in the admin since. It still counts as made of that text if only the parts
        that were variables differ.
        """
        source: str = getattr(row, self.entry.templates[name])
        pattern = VARIABLE.sub(lambda found: "${" if found[1] is None else "*", escape(source))
        return source if source and fnmatchcase(getattr(row, self.column(name)), pattern) else ""

    def export(self, variables: Variables) -> Any:
        rows = self.rows()
        return [self.written(rows[name], rows, variables) for name in sorted(rows)]

    def written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        shown = self.shown(row)
        defaults = self.entry.defaults(shown) | dict.fromkeys(self.entry.kept, False)
        found: dict[str, Any] = {}
        for name, field in self.form.fields.items():
            if isinstance(field, Secret):
                if (value := self.secret(row, name)) is not None:
                    found[name] = self.placeholder(row, name, value, variables)
            elif name in self.entry.templates and (source := self.template(row, name)):
                variables.note(source)
                found[name] = source
            elif name not in defaults or not same_json(shown[name], defaults[name]):
                found[name] = shown[name]
        return found

    def placeholder(self, row: Any, name: str, value: Any, variables: Variables) -> Any:
        kind = self.name.removesuffix("s")
        if not isinstance(self.form.fields[name], Headers):
            return variables.placeholder(kind, row.name, self.column(name))
        if value is LOST:
            raise ValueError(f"No key of ENCRYPTION_KEYS decrypts the headers of {self.name}.{row.name}.")
        return {header: variables.placeholder(kind, row.name, "HEADER", header) for header in parse_headers(value)}


class Models(Table):
    def rows(self) -> dict[str, Any]:
        providers = Provider.objects.defer("api_key", "headers").in_bulk()
        rows = super().rows()
        for row in rows.values():
            row.provider = providers[row.provider_id]
        return rows

    def check(self, entries: dict[str, Given], rows: dict[str, Any], work: Work) -> None:
        providers = Provider.objects.defer("api_key", "headers").in_bulk(field_name="name")
        known = rows.keys() | entries.keys()
        defaults = [name for name, given in entries.items() if given.values.get("is_default")]
        for name, given in entries.items():
            if problem := rules.problem_of_fallbacks(given.values["fallbacks"], known - {name}):
                work.wrong((*given.path, "fallbacks"), problem)
            provider = given.values["provider"]
            given.values["provider"] = providers.get(provider)
            if provider not in providers:
                work.wrong((*given.path, "provider"), f"There is no provider named {provider[:100]}.")
            if name in defaults[1:]:
                problem = f"Only one model can be the default; {self.name}.{defaults[0]} is."
                work.wrong((*given.path, "isDefault"), problem)

    def complete(self, entries: dict[str, Given], rows: dict[str, Any]) -> None:
        chosen = next((name for name, given in entries.items() if given.values.get("is_default")), None)
        for name, row in rows.items():
            if chosen is not None and row.is_default and name != chosen:
                entries.setdefault(name, Given(())).values["is_default"] = False

    def written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        # A fallback may have been deleted.
        row.fallbacks = [name for name in row.fallbacks if name in rows]
        found = super().written(row, rows, variables)
        # Without this, the default model of the other installation would stay.
        return found if any(other.is_default for other in rows.values()) else found | {"isDefault": False}


class Tools(Table):
    def stays(self, row: Any) -> bool:
        return bool(row.node_type == BUILTIN)


class Agents(Table):
    """A change of an agent makes a version, as it does in the admin."""

    def rows(self) -> dict[str, Any]:
        """The agents with the columns of their current versions."""
        current = {row.agent_id: row for row in AgentVersion.objects.filter(number=F("agent__version"))}
        found = {}
        for agent in Agent.objects.order_by("name"):
            version = current.get(agent.pk)
            content = {column: getattr(version, column, default) for column, default in agents.CONTENT.items()}
            shown = {column: getattr(agent, column) for column in ("name", "display_name", "description", "enabled")}
            found[agent.name] = SimpleNamespace(**shown, **content)
        return found

    def new(self) -> Any:
        return SimpleNamespace()

    def stays(self, row: Any) -> bool:
        return False

    def save(self, row: Any, given: Given, change: Change, work: Work) -> bool:
        if not given.path:
            # Pruned, without a check of what no longer matters: its tools may have been deleted.
            return bool(Agent.objects.filter(name=row.name).update(enabled=False))
        try:
            # The order of an agent's tools, for example, is no change.
            return bool(agents.save(**given.values).changed)
        except agents.InvalidAgent as invalid:
            names = {field.source: name for name, field in self.form.fields.items()}
            work.wrong(given.path, {names[column]: problem for column, problem in invalid.problems.items()})
            return False

    def written(self, row: Any, rows: dict[str, Any], variables: Variables) -> dict[str, Any]:
        """What a version names may have been deleted; a file that names it could not be applied."""
        if row.tools is not None:
            known = set(Tool.objects.values_list("name", flat=True))
            row.tools = [tool for tool in row.tools if tool in known]
        if row.model is not None and not AgentModel.objects.filter(name=row.model).exists():
            gone = f"{self.name}.{row.name} has no model in this file, because {row.model} was deleted"
            variables.notes.append(f"{gone}: it will use the default one.")
            row.model = None
        return super().written(row, rows, variables)


class InstallationEndpoint(Table):
    """One entry without a name. The path and the query of an address are not shown: for many receivers they are the
    credential.
    """

    hidden = frozenset({"url"})

    def read(self, value: Any, work: Work) -> dict[str, Given]:
        given = None if value is None else self.read_entry((self.name,), value, work)
        return {} if given is None else {"": given}

    def rows(self) -> dict[str, Any]:
        endpoint = opened(services.endpoints_of(services.INSTALLATION))
        return {} if endpoint is None else {"": endpoint}

    def stays(self, row: Any) -> bool:
        return False

    def save(self, row: Any, given: Given, change: Change, work: Work) -> bool:
        if change.fields.keys() & {"url", "secret"}:
            secret = given.values["secret"] if "secret" in change.fields else None
            rotate = secret is not None
            services.register(services.INSTALLATION, row.url, rotate=rotate, extended=True, secret=secret)
        services.change(services.INSTALLATION, enabled=row.enabled)
        return True

    def export(self, variables: Variables) -> Any:
        row = self.rows().get("")
        if row is None:
            return None
        parts = urlsplit(row.url)
        url = f"{parts.scheme}://{parts.netloc}".replace("${", "$${")
        if parts.path not in ("", "/") or parts.query:
            url += "/" + variables.placeholder("INSTALLATION", "ENDPOINT", "PATH")
        else:
            url += parts.path
        found = {"url": url, "secret": variables.placeholder("INSTALLATION", "ENDPOINT", "SECRET")}
        return found if row.enabled else found | {"enabled": False}


# In the order in which they refer to each other.
TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table("providers", ProviderEntry),
        Models("models", ModelEntry),
        Tools("tools", ToolEntry),
        Agents("agents", AgentEntry),
        InstallationEndpoint(ENDPOINT, EndpointEntry),
    )
}
