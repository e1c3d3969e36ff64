"""What uses the rows that an apply has disabled, as warnings: they are disabled all the same."""

from __future__ import annotations

from collections import defaultdict

from django.conf import settings

from runs.catalogue import versions
from runs.catalogue.file.base import Work
from runs.models import AgentModel


def warn_of_disabled(work: Work) -> None:
    offered = AgentModel.objects.filter(enabled=True, provider__enabled=True)
    if not offered.filter(is_default=True).exists():
        work.warnings.append("No enabled model is the default: runs must name one.")
    disabled: dict[str, set[str]] = defaultdict(set)
    for change in work.changes:
        if any(one.name == "enabled" and one.after is False for one in change.fields):
            table, _, name = change.place.partition(".")
            disabled[table].add(name)
    warnings = _of_models(disabled["providers"], disabled["models"])
    for name, agent in versions.listed().items():
        if agent.model in disabled["models"]:
            warnings.append(f"agents.{name} cannot be used: its model {agent.model} is not offered.")
        for tool in agent.tools or ():
            if tool in disabled["tools"]:
                warnings.append(f"agents.{name} does not get the tool {tool}, which is disabled.")
    work.warnings += [warning for warning in warnings if warning not in work.warnings]


def _of_models(providers: set[str], models: set[str]) -> list[str]:
    """Adds the models of ``providers`` to ``models``, because they are not offered either."""
    found = []
    columns = ("name", "provider__name", "fallbacks")
    rows = list(AgentModel.objects.filter(enabled=True).order_by("name").values_list(*columns))
    for name, provider, _ in rows:
        if provider in providers:
            models.add(name)
            found.append(f"models.{name} cannot be used: its provider {provider} is disabled.")
    for name, _, fallbacks in rows:
        for fallback in fallbacks:
            if fallback in models and name not in models:
                found.append(f"models.{name} has no fallback {fallback}: it is not offered.")
    if settings.RUN_SUMMARY_MODEL in models:
        found.append(f"RUN_SUMMARY_MODEL is {settings.RUN_SUMMARY_MODEL}, which is not offered.")
    return found
