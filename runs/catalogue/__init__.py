"""The models and tools that runs may use, cached in each process.

Every turn and every call needs them and the rows change rarely, so a process reads them at most once in
``MAX_AGE_SECONDS``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from config.kernel.encryption import DecryptionFailed
from runs.models import AgentModel, Tool
from runs.tools.base import ToolDefinition

logger = logging.getLogger(__name__)

MAX_AGE_SECONDS = 2.0


@dataclass(frozen=True)
class Catalogue:
    models: dict[str, AgentModel]
    tools: dict[str, ToolDefinition]
    read_at: float = field(default_factory=time.monotonic)

    def default_model(self) -> AgentModel | None:
        return next((model for model in self.models.values() if model.is_default), None)

    def model(self, name: str | None) -> AgentModel | None:
        """The enabled model of that name; the default one for None."""
        return self.models.get(name) if name is not None else self.default_model()

    def tools_for(self, allowed: list[str] | None) -> dict[str, ToolDefinition]:
        """The enabled tools whose names are in ``allowed``, or all for None."""
        if allowed is None:
            return self.tools
        return {name: tool for name, tool in self.tools.items() if name in allowed}


_lock = threading.Lock()
_current: Catalogue | None = None


def read() -> Catalogue:
    """The enabled models and tools, at most ``MAX_AGE_SECONDS`` old."""
    current = _current
    if current is None or time.monotonic() - current.read_at > MAX_AGE_SECONDS:
        current = refresh()
    return current


def remembered() -> Catalogue:
    """The cached catalogue, however old. For the event loop of a worker, which must not query the database: the
    worker's heartbeat refreshes the cache.
    """
    return _current if _current is not None else Catalogue({}, {})


def refresh() -> Catalogue:
    """Read the catalogue now."""
    global _current
    current = Catalogue(
        models={model.name: model for model in AgentModel.objects.filter(enabled=True).order_by("name")},
        tools={tool.name: tool for tool in _tools()},
    )
    with _lock:
        _current = current
    return current


def find_model(name: str | None) -> AgentModel | None:
    """``Catalogue.model``; a name that this process does not know is looked up in the database."""
    return remembered().model(name) or refresh().model(name)


def learn_tools(names: Collection[str]) -> None:
    """Read the catalogue now if the database has one of the tools, which this process does not know."""
    if Tool.objects.filter(enabled=True, name__in=names).exists():
        refresh()


def _tools() -> Iterator[ToolDefinition]:
    """The enabled tools without those that cannot be read, which are logged, so that only their own calls fail."""
    enabled = Tool.objects.filter(enabled=True).order_by("name")
    try:
        rows = list(enabled)
    except DecryptionFailed:
        logger.error("tools with secret headers are left out: no key of ENCRYPTION_KEYS decrypts them")
        rows = list(enabled.filter(secret_headers=None))
    for row in rows:
        try:
            yield ToolDefinition.from_row(row)
        except ValueError as error:
            logger.error("the tool %s is left out: %s", row.name, error)


def forget() -> None:
    """Drop this process's cache, so that the next use reads the rows. Other processes follow in MAX_AGE_SECONDS."""
    global _current
    with _lock:
        _current = None
