"""The versions of agents as runs use them. A version never changes, so a process reads it once."""

from __future__ import annotations

import re
from functools import lru_cache

from django.db.models import F

from runs.models import AgentVersion

# Versions that a process keeps. Each can have 100,000 characters of instructions.
KEPT = 100
REFERENCE = re.compile(r"([A-Za-z0-9_-]{1,64})(?:@([1-9][0-9]{0,8}))?")


def listed() -> dict[str, AgentVersion]:
    """The current versions of the enabled agents by name, with the columns that lists show."""
    rows = AgentVersion.objects.filter(agent__enabled=True, number=F("agent__version")).select_related("agent")
    shown = ("agent__name", "agent__display_name", "agent__description", "number", "model", "tools")
    return {row.name: row for row in rows.only(*shown).order_by("agent__name")}


def parse_reference(reference: str) -> tuple[str, int | None] | None:
    """``name`` or ``name@3`` as name and number; None for any other text."""
    match = REFERENCE.fullmatch(reference)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def of_run(reference: str | None) -> AgentVersion | None:
    """The version that a run is pinned to. Raises AgentVersion.DoesNotExist."""
    if reference is None:
        return None
    name, _, number = reference.partition("@")
    return _read(name, int(number))


def find(name: str, number: int) -> AgentVersion | None:
    """The version, also of a disabled agent: runs keep theirs."""
    try:
        return _read(name, number)
    except AgentVersion.DoesNotExist:
        return None


@lru_cache(maxsize=KEPT)
def _read(name: str, number: int) -> AgentVersion:
    return AgentVersion.objects.select_related("agent").get(agent__name=name, number=number)


def forget() -> None:
    """Drop what this process has read."""
    _read.cache_clear()
