"""Agents as staff write them: checked, and stored as versions that never change."""

from typing import Any

from django.core.validators import RegexValidator
from django.db import transaction
from django.db.models import Max
from rest_framework import serializers

from config.api.serializers import StrictIntegerField
from config.kernel.jsontext import same_json
from runs import catalogue
from runs.catalogue import rules
from runs.catalogue.definitions import check_parameters
from runs.catalogue.rules import Names, Object, OneOf, Text, fits
from runs.models import Agent, AgentModel, AgentVersion, OnCreditsExhausted, Tool
from runs.tools.schema import check_output_schema

INSTRUCTIONS_MAX_CHARS = 100_000
DISPLAY_NAME_MAX_CHARS, DESCRIPTION_MAX_CHARS, TOOLS_MAX = 100, 20_000, 200
# The columns of a version, with the default values, which mean "nothing of its own".
CONTENT: dict[str, Any] = {
    column.name: column.get_default()
    for column in AgentVersion._meta.concrete_fields
    if column.name not in ("id", "agent", "number", "created_at")
}


def save(
    name: str, *, display_name: str, description: str = "", enabled: bool = True, **content: Any
) -> tuple[Agent, list[str]]:
    """Store an agent, and a new version if a column of ``CONTENT`` changes. Columns that are not given get their
    defaults. Amounts are micro-credits. Returns the agent and the columns with new values. Raises ValidationError.
    """
    shown = {"display_name": display_name, "description": description, "enabled": enabled}
    version = CONTENT | content
    Columns(data={"name": name} | shown | version).is_valid(raise_exception=True)
    with transaction.atomic():
        # If two callers create the agent at the same time, there is one row; its lock gives each version its number.
        Agent.objects.get_or_create(name=name, defaults=shown)
        agent = Agent.objects.select_for_update(no_key=True).get(name=name)
        current = AgentVersion.objects.filter(agent=agent, number=agent.version).first()
        changed = [column for column, value in shown.items() if getattr(agent, column) != value]
        others = [column for column, value in version.items() if current is None or differs(current, column, value)]
        if others:
            newest = agent.versions.aggregate(number=Max("number", default=0))["number"]
            shown["version"] = newest + 1
            AgentVersion.objects.create(agent=agent, number=newest + 1, **version)
        if changed or others:
            _change(agent, **shown)
    return agent, changed + others


def differs(current: Any, column: str, value: Any) -> bool:
    """Whether ``current``, a version or an object with its columns, has another value in this column."""
    before = getattr(current, column)
    if column == "tools" and before is not None and value is not None:
        return sorted(before) != sorted(value)  # the order of tools has no meaning
    return not same_json(before, value)


def choose(name: str, number: int) -> Agent:
    """Make an existing version the current one. Raises AgentVersion.DoesNotExist."""
    with transaction.atomic():
        agent = Agent.objects.select_for_update(no_key=True).get(name=name)
        AgentVersion.objects.only("pk").get(agent=agent, number=number)
        _change(agent, version=number)
    return agent


def _change(agent: Agent, **columns: Any) -> None:
    for column, value in columns.items():
        setattr(agent, column, value)
    agent.save(update_fields=list(columns))
    transaction.on_commit(catalogue.refresh, robust=True)


class Columns(serializers.Serializer):
    """The rules of each column of an agent and its versions. Amounts are micro-credits."""

    name = Text(validators=[RegexValidator(rf"\A{rules.TOOL_NAME.pattern}\Z", "Use 1 to 64 letters, digits, _ and -.")])
    display_name = Text(max_length=DISPLAY_NAME_MAX_CHARS)
    description = Text(max_length=DESCRIPTION_MAX_CHARS, allow_blank=True)
    instructions = Text(max_length=INSTRUCTIONS_MAX_CHARS, allow_blank=True)
    model = Text(allow_null=True)
    tools = Names(max_length=TOOLS_MAX, allow_null=True)
    parameters = Object(validators=[fits(check_parameters)])
    credit_approval_threshold = StrictIntegerField(min_value=0, allow_null=True)
    max_credits = StrictIntegerField(min_value=1, allow_null=True)
    on_credits_exhausted = OneOf(OnCreditsExhausted.choices)
    output_schema = Object(allow_null=True, validators=[fits(check_output_schema)])

    def validate_model(self, name: str | None) -> str | None:
        if name is not None and not AgentModel.objects.filter(name=name).exists():
            raise serializers.ValidationError(f"There is no model named {name[:100]}.")
        return name

    def validate_tools(self, names: list[str] | None) -> list[str] | None:
        known = set(Tool.objects.filter(name__in=names or ()).values_list("name", flat=True))
        if problem := rules.problem_of_names(names or (), known, TOOLS_MAX, "tool"):
            raise serializers.ValidationError(problem)
        return names


def problems_of(columns: dict[str, Any]) -> dict[str, Any]:
    checked = Columns(data=columns)
    return {} if checked.is_valid() else dict(checked.errors)
