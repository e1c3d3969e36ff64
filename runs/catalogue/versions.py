"""The versions of agents as runs use them. A version never changes, so a process reads it once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from django.db.models import F

from runs.models import AgentVersion

# Versions that a process keeps. Each can have 100,000 characters of instructions.
KEPT = 100
REFERENCE = re.compile(r"([A-Za-z0-9_-]{1,64})(?:@([1-9][0-9]{0,8}))?")


@dataclass(frozen=True, slots=True)
class ListedAgent:
    """An enabled agent as lists show it. ``version`` is the number of its current version."""

    name: str
    display_name: str
    description: str
    version: int
    model: str | None
    tools: list[str] | None


@dataclass(frozen=True, slots=True)
class AgentDefinition:
    """A version of an agent. Amounts are micro-credits. None: the default model, all tools, no threshold, budget or
    schema of its own.
    """

    name: str
    number: int
    instructions: str
    model: str | None
    tools: list[str] | None
    parameters: Mapping[str, Any]
    credit_approval_threshold: int | None
    max_credits: int | None
    on_credits_exhausted: str
    output_schema: Mapping[str, Any] | None

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"


def listed() -> dict[str, ListedAgent]:
    """The enabled agents by name."""
    current = AgentVersion.objects.filter(agent__enabled=True, number=F("agent__version")).order_by("agent__name")
    columns = ("agent__name", "agent__display_name", "agent__description", "number", "model", "tools")
    return {row[0]: ListedAgent(*row) for row in current.values_list(*columns)}


def parse_reference(reference: str) -> tuple[str, int | None] | None:
    """``name`` or ``name@3`` as name and number; None for any other text."""
    match = REFERENCE.fullmatch(reference)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def of_run(reference: str | None) -> AgentDefinition | None:
    """The version that a run is pinned to. Raises AgentVersion.DoesNotExist."""
    if reference is None:
        return None
    name, _, number = reference.partition("@")
    return _read(name, int(number))


def find(name: str, number: int) -> AgentDefinition | None:
    """The version, also of a disabled agent: runs keep theirs."""
    try:
        return _read(name, number)
    except AgentVersion.DoesNotExist:
        return None


@lru_cache(maxsize=KEPT)
def _read(name: str, number: int) -> AgentDefinition:
    row = AgentVersion.objects.get(agent__name=name, number=number)
    return AgentDefinition(name, *(getattr(row, column.name) for column in fields(AgentDefinition)[1:]))


def forget() -> None:
    """Drop what this process has read."""
    _read.cache_clear()
