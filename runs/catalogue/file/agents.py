"""The section ``agents`` of the catalogue file. A change of an agent makes a version, as it does in the admin."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.db.models import F

from config.kernel.jsontext import same_json
from config.kernel.yamltext import Node
from runs.catalogue import agents
from runs.catalogue.file import fields
from runs.catalogue.file.base import MISSING, Change, FieldChange, Variables, Work
from runs.catalogue.file.fields import ENABLED, REQUIRED, Entry, Field, read_table
from runs.catalogue.output import check_output_schema
from runs.catalogue.parameters import check_parameters
from runs.models import Agent, AgentModel, AgentVersion, Tool

NAME = "agents"
_object = partial(Field, show=fields.ordered, same=same_json)
FIELDS = (
    Field("name", "name", fields.name),
    Field("displayName", "display_name", fields.text, fields.own_name),
    Field("description", "description", fields.text, ""),
    Field("instructions", "instructions", fields.text, ""),
    Field("model", "model", fields.text, None),
    Field("tools", "tools", fields.names, None),
    _object("parameters", "parameters", fields.mapping(check_parameters), {}),
    Field("creditApprovalThreshold", "credit_approval_threshold", fields.amount(0), None, show=fields.optional_amount),
    Field("maxCredits", "max_credits", fields.amount(1), None, show=fields.optional_amount),
    _object("outputSchema", "output_schema", fields.mapping(check_output_schema), None),
    ENABLED,
)


class Agents:
    name = NAME

    def read(self, node: Node, work: Work) -> dict[str, Entry]:
        return read_table(NAME, FIELDS, node, work)

    def apply(self, found: dict[str, Entry], work: Work) -> None:
        stored = _stored()
        for name, entry in found.items():
            change = _change(entry, stored.get(name))
            if not change.fields and not change.is_new:
                continue
            try:
                # The order of an agent's tools, for example, is no change.
                if agents.save(**entry.values).changed:
                    work.changes.append(change)
            except agents.InvalidAgent as invalid:
                names = {field.column: field.name for field in FIELDS}
                for column, problem in invalid.problems.items():
                    work.wrong(entry.lines.get(column, entry.line), f"{entry.place}.{names[column]}", problem)
        for name, values in stored.items():
            if work.prune and name not in found and values["enabled"]:
                # Without a check of what no longer matters: its tools may have been deleted.
                Agent.objects.filter(name=name).update(enabled=False)
                work.changes.append(Change(f"{NAME}.{name}", fields=[FieldChange("enabled", True, False)]))

    def export(self, variables: Variables) -> list[dict[str, Any]]:
        stored = _stored()
        models, tools = (set(table.objects.values_list("name", flat=True)) for table in (AgentModel, Tool))
        written = []
        for name in sorted(stored):
            values = stored[name]
            # What a version names may have been deleted; a file that names it could not be applied.
            if values["tools"] is not None:
                values["tools"] = [tool for tool in values["tools"] if tool in tools]
            if values["model"] is not None and values["model"] not in models:
                variables.notes.append(
                    f"{NAME}.{name} has no model in this file, because {values['model']} was deleted: it will use the "
                    "default one."
                )
                values["model"] = None
            entry = Entry("", 0, values, {})
            shown = {field.name: field.show(values[field.column]) for field in FIELDS}
            written.append(
                {
                    field.name: shown[field.name]
                    for field in FIELDS
                    if entry.default(field) is REQUIRED or values[field.column] != entry.default(field)
                }
            )
        return written


def _stored() -> dict[str, dict[str, Any]]:
    """The agents with the values of their current versions, by column."""
    current = AgentVersion.objects.filter(number=F("agent__version"))
    versions = {version.agent_id: version for version in current}
    found = {}
    for name, agent in Agent.objects.in_bulk(field_name="name").items():
        version = versions.get(agent.pk)
        content = {column: getattr(version, column, default) for column, default in agents.CONTENT.items()}
        shown = {"name": name, "display_name": agent.display_name, "description": agent.description}
        found[name] = shown | {"enabled": agent.enabled} | content
    return found


def _change(entry: Entry, stored: dict[str, Any] | None) -> Change:
    change = Change(entry.place, is_new=stored is None)
    for field in FIELDS[1:]:
        after = entry.values[field.column]
        before = entry.default(field) if stored is None else stored[field.column]
        if not field.same(before, after):
            shown = MISSING if stored is None else field.show(before)
            change.fields.append(FieldChange(field.name, shown, field.show(after)))
    return change
