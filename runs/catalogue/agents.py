"""What staff write of agents: checked, and stored as versions that never change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import Max

from config.kernel.jsontext import INTEGER_MAX, same_json, to_text
from runs import catalogue
from runs.catalogue.parameters import check_output_schema, check_parameters
from runs.catalogue.versions import parse_reference
from runs.models import Agent, AgentModel, AgentVersion, OnCreditsExhausted, Tool

# Characters of an agent's instructions.
AGENT_INSTRUCTIONS_MAX_CHARS = 100_000

DISPLAY_NAME_MAX_CHARS, DESCRIPTION_MAX_CHARS, TOOLS_MAX = 100, 20_000, 200
# The columns of a version with the values that stand for "nothing of its own".
CONTENT: dict[str, Any] = {
    "instructions": "",
    "model": None,
    "tools": None,
    "parameters": {},
    "credit_approval_threshold": None,
    "max_credits": None,
    "on_credits_exhausted": OnCreditsExhausted.FAIL.value,
    "output_schema": None,
}


class InvalidAgent(ValueError):
    """``problems``: what is wrong with each column, for people."""

    def __init__(self, problems: dict[str, str]) -> None:
        self.problems = problems
        super().__init__(" ".join(f"{column}: {problem}" for column, problem in problems.items()))


@dataclass
class Saved:
    """``changed``: the columns whose values are new. ``is_new_version``: whether one of them belongs to a version."""

    agent: Agent
    is_new: bool = False
    is_new_version: bool = False
    changed: list[str] = field(default_factory=list)


def save(name: str, *, display_name: str, description: str = "", enabled: bool = True, **content: Any) -> Saved:
    """Store an agent by its name, and a new version if something of ``CONTENT`` changes; what is left out of it has its
    default. Amounts are micro-credits. Raises InvalidAgent.
    """
    shown = {"display_name": display_name, "description": description, "enabled": enabled}
    version = CONTENT | content
    check(name, shown, version)
    with transaction.atomic():
        # Two callers may create it at the same time: there is one row, and its lock gives each version its own number.
        Agent.objects.get_or_create(name=name, defaults=shown)
        agent = _lock(name)
        current = AgentVersion.objects.filter(agent=agent, number=agent.version).first()
        saved = Saved(agent, is_new=current is None)
        saved.changed = [column for column, value in shown.items() if getattr(agent, column) != value]
        others = [column for column, value in version.items() if current is None or _differs(current, column, value)]
        if others:
            saved.is_new_version = True
            newest = agent.versions.aggregate(number=Max("number", default=0))["number"]
            shown["version"] = newest + 1
            AgentVersion.objects.create(agent=agent, number=newest + 1, **version)
        saved.changed += others
        if saved.changed:
            _change(agent, **shown)
    return saved


def _differs(current: AgentVersion, column: str, value: Any) -> bool:
    before = getattr(current, column)
    if column == "tools" and before is not None and value is not None:
        return sorted(before) != sorted(value)  # their order means nothing
    return not same_json(before, value)


def choose(name: str, number: int) -> Agent:
    """Make an existing version the current one. Raises AgentVersion.DoesNotExist."""
    with transaction.atomic():
        agent = _lock(name)
        AgentVersion.objects.only("pk").get(agent=agent, number=number)
        _change(agent, version=number)
    return agent


def _lock(name: str) -> Agent:
    return Agent.objects.select_for_update(no_key=True).get(name=name)


def _change(agent: Agent, **columns: Any) -> None:
    for column, value in columns.items():
        setattr(agent, column, value)
    agent.save(update_fields=list(columns))
    transaction.on_commit(catalogue.refresh, robust=True)


def check(name: str, shown: dict[str, Any], version: dict[str, Any]) -> None:
    """Raises InvalidAgent."""
    problems: dict[str, str] = {}
    reference = parse_reference(name)
    if reference is None or reference[1] is not None:
        problems["name"] = "Use 1 to 64 letters, digits, _ and -."
    if unknown := version.keys() - CONTENT:
        raise TypeError(f"an agent has no {', '.join(sorted(unknown))}")
    for column, (checked, *limits) in CHECKS.items():
        value = (shown | version)[column]
        try:
            if value is not None or CONTENT.get(column, "") is not None:
                checked(value, *limits)
        except ValueError as error:
            problems[column] = str(error)
    if not shown["display_name"]:
        problems["display_name"] = "This field is required."
    if problems:
        raise InvalidAgent(problems)


def _check_text(value: Any, most: int) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("Text is required.")
    if len(value) > most:
        raise ValueError(f"At most {most} characters.")


def _check_model(value: Any) -> None:
    if not (isinstance(value, str) and AgentModel.objects.filter(name=value).exists()):
        raise ValueError(f"There is no model named {str(value)[:100]}.")


def _check_tools(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("A list of names is required.")
    if len(value) > TOOLS_MAX or len(set(value)) < len(value):
        raise ValueError(f"At most {TOOLS_MAX} names, each once.")
    known = set(Tool.objects.filter(name__in=value).values_list("name", flat=True))
    if unknown := [name for name in value if name not in known]:
        raise ValueError(f"There is no tool named {unknown[0][:100]}.")


def _check_parameters(value: Any) -> None:
    to_text(check_parameters(value))


def _check_amount(value: Any, least: int) -> None:
    if not (type(value) is int and least <= value < INTEGER_MAX):
        raise ValueError("An amount of credits is required.")


def _check_choice(value: Any) -> None:
    if value not in OnCreditsExhausted.values:
        raise ValueError(f"Use one of {', '.join(OnCreditsExhausted.values)}.")


# By column, the check with its limit. A column of CONTENT whose value there is None may be None.
CHECKS: dict[str, tuple[Any, ...]] = {
    "display_name": (_check_text, DISPLAY_NAME_MAX_CHARS),
    "description": (_check_text, DESCRIPTION_MAX_CHARS),
    "instructions": (_check_text, AGENT_INSTRUCTIONS_MAX_CHARS),
    "model": (_check_model,),
    "tools": (_check_tools,),
    "parameters": (_check_parameters,),
    "credit_approval_threshold": (_check_amount, 0),
    "max_credits": (_check_amount, 1),
    "on_credits_exhausted": (_check_choice,),
    "output_schema": (check_output_schema,),
}
