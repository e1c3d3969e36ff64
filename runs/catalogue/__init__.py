"""The models, tools and agents that runs may use, cached in each process: they change rarely."""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from django.db.models import F, QuerySet

from config.api.serializers import did_you_mean
from config.kernel.encryption import DecryptionFailed
from config.kernel.errors import ValidationFailed
from runs.catalogue.definitions import ModelDefinition
from runs.models import RESERVED_TOOL_NAMES, Agent, AgentModel, AgentVersion, Run, Tool, TypicalCredits
from runs.tools.base import ToolDefinition

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_AGE_SECONDS = 2.0
# The most versions of agents that a process caches. Each can have 100,000 characters of instructions.
VERSIONS_KEPT = 100
REFERENCE = re.compile(r"([A-Za-z0-9_-]{1,64})(?:@([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Catalogue:
    models: dict[str, ModelDefinition]
    tools: dict[str, ToolDefinition]
    # By model, also for disabled models: runs that use a disabled model continue with its fallbacks.
    fallbacks: dict[str, list[str]]
    agents: dict[str, AgentVersion]
    typical: dict[tuple[str, str], TypicalCredits]  # by kind (``agent`` or ``model``) and name
    read_at: float

    def model(self, name: str | None) -> ModelDefinition | None:
        """The enabled model with this name; for None, the default model."""
        if name is not None:
            return self.models.get(name)
        return next((model for model in self.models.values() if model.is_default), None)

    def chain(self, requested: str | None, resolved: str | None) -> list[ModelDefinition]:
        """The models that a run may ask, in order: the requested one and its fallbacks, beginning with the model that
        answered last (``resolved``) if it is among them. If the run requested no model, or a deleted one, it keeps the
        model that answered last, with that model's fallbacks.
        """
        default = self.model(None)
        first = requested or (default.name if default else None)
        names = [first, *self.fallbacks.get(first, ())] if first else []
        if resolved and resolved not in names and (requested is None or requested not in self.fallbacks):
            names = [resolved, *self.fallbacks.get(resolved, ())]
        models = [self.models[name] for name in dict.fromkeys(names) if name in self.models]
        at = next((at for at, model in enumerate(models) if model.name == resolved), 0)
        return models[at:] + models[:at]


_lock = threading.Lock()
_refreshing = threading.Lock()
NOTHING = Catalogue({}, {}, {}, {}, {}, read_at=-math.inf)
_current = NOTHING
_forgotten_at = 0.0


def read() -> Catalogue:
    """The enabled models, tools and agents. If they are older than ``MAX_AGE_SECONDS``, one thread reads them again;
    meanwhile the other threads use the older ones, up to twice that age.
    """
    current = _current
    age = time.monotonic() - current.read_at
    if age > 2 * MAX_AGE_SECONDS:
        return refresh()
    if age > MAX_AGE_SECONDS and _refreshing.acquire(blocking=False):
        try:
            return refresh()
        finally:
            _refreshing.release()
    return current


def remembered() -> Catalogue:
    """The cached catalogue, however old: for a worker's event loop, which must not query the database."""
    return _current


def refresh() -> Catalogue:
    global _current
    started = time.monotonic()
    models = AgentModel.objects.filter(enabled=True, provider__enabled=True).select_related("provider")
    current = Catalogue(
        models=_readable(models, ModelDefinition.from_row),
        tools=tools_where(enabled=True),
        fallbacks=_fallbacks(),
        agents=current_agents(),
        typical={(row.kind, row.name): row for row in TypicalCredits.objects.all()},
        read_at=started,
    )
    with _lock:
        # Another thread may have started its read later, or changed a row meanwhile: then its catalogue is newer.
        if started > _forgotten_at and started > _current.read_at:
            _current = current
    return current


def find_models(requested: str | None, resolved: str | None) -> list[ModelDefinition]:
    """``Catalogue.chain``. If the cached catalogue has no model for it, the database is read."""
    return remembered().chain(requested, resolved) or refresh().chain(requested, resolved)


def models_of(run: Run) -> list[ModelDefinition]:
    return find_models(requested_model(run, version_of(run.agent)), run.resolved_model)


def requested_model(run: Run, agent: AgentVersion | None) -> str | None:
    """The model that the run's request named, or else its agent's; None for the default model."""
    return run.requested_model or (agent.model if agent else None)


def learn_tools(names: Collection[str]) -> None:
    """Read the catalogue now if the database has one of these tools, which this process does not know."""
    if Tool.objects.filter(enabled=True, name__in=names).exists():
        refresh()


def tools_where(**columns: Any) -> dict[str, ToolDefinition]:
    """The tools with these columns, without those whose secrets cannot be read."""
    return _readable(Tool.objects.filter(**columns), ToolDefinition.from_row)


def display_names(names: Collection[str]) -> dict[str, str]:
    """The display names of the tools that exist, also of disabled ones, by name."""
    shown = Tool.objects.filter(name__in=names).exclude(display_name="")
    return dict(shown.values_list("name", "display_name")) if names else {}


def find_agent(reference: str) -> AgentVersion | None:
    """The version for ``name`` (the current one) or ``name@3``; None if there is no such enabled agent."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        return None
    name, agents = match[1], read().agents
    if name not in agents and Agent.objects.filter(name=name, enabled=True).exists():
        agents = refresh().agents
    try:
        return _version(name, int(match[2] or agents[name].number)) if name in agents else None
    except AgentVersion.DoesNotExist:
        return None


def current_agents() -> dict[str, AgentVersion]:
    """The current versions of the enabled agents, by name, with only the columns that lists show."""
    rows = AgentVersion.objects.filter(agent__enabled=True, number=F("agent__version")).select_related("agent")
    shown = ("agent__name", "agent__display_name", "agent__description", "number", "model", "tools")
    return {row.name: row for row in rows.only(*shown).order_by("agent__name")}


def version_of(reference: str | None) -> AgentVersion | None:
    """The version that a run is pinned to, also if its agent is disabled. Raises AgentVersion.DoesNotExist."""
    if reference is None:
        return None
    name, _, number = reference.partition("@")
    return _version(name, int(number))


def check_offered(agent: str | None, model: str | None, tools: list[str] | None, own: list[str]) -> AgentVersion | None:
    """The version of the run's agent. Raises ValidationFailed if the run names an agent, model or tool that is not
    offered to it, or if a tool of its ``own`` has the name of one of the service's.
    """
    given = find_agent(agent) if agent is not None else None
    offered = read()
    agents_model = given.model if given is not None and model is None else None
    if offered.model(agents_model or model) is None or not offered.tools.keys() >= set(tools or ()):
        offered = refresh()  # the row may be newer than the cache
    problems: dict[str, list[str]] = {}
    if agent is not None and given is None:
        problems["agent"] = [f"There is no agent named {agent}.", *did_you_mean(agent, offered.agents)]
    elif agents_model is not None:
        if offered.model(agents_model) is None:
            problems["agent"] = [f"The agent's model, {agents_model}, is not offered."]
    elif offered.model(model) is None:
        unknown = [f"There is no model named {model}.", *did_you_mean(model or "", offered.models)]
        problems["model"] = ["There is no default model; name one."] if model is None else unknown
    for index, name in enumerate(tools or ()):
        if name not in offered.tools:
            # A search for similar names takes time, so it is made only for the first problem, which `message` shows.
            meant = [] if problems else did_you_mean(name, offered.tools)
            problems[f"tools.{index}"] = [f"There is no tool named {name}.", *meant]
        elif given is not None and given.tools is not None and name not in given.tools:
            problems[f"tools.{index}"] = [f"The agent {given.reference} has no tool named {name}."]
    taken = {*RESERVED_TOOL_NAMES, *(Tool.objects.filter(name__in=own).values_list("name", flat=True) if own else ())}
    for index, name in enumerate(own):
        if name in taken:
            problems[f"clientTools.{index}.name"] = [f"The service has a tool named {name}."]
    if problems:
        raise ValidationFailed(problems)
    return given


@lru_cache(maxsize=VERSIONS_KEPT)
def _version(name: str, number: int) -> AgentVersion:
    """A version never changes, so a process reads it once."""
    return AgentVersion.objects.select_related("agent").get(agent__name=name, number=number)


def _readable(rows: QuerySet[Any], definition: Callable[[Any], T]) -> dict[str, T]:
    """The definitions of the rows by name. Unreadable rows are logged and left out, so only their users fail."""
    what, found = rows.model._meta.verbose_name, dict[str, T]()
    for row in rows.order_by("name"):
        try:
            found[row.name] = definition(row)
        except (ValueError, DecryptionFailed) as error:
            logger.error("the %s %s is left out: %s", what, row.name, error)
    return found


def _fallbacks() -> dict[str, list[str]]:
    rows = AgentModel.objects.values_list("name", "fallbacks")
    lists = {name: others if isinstance(others, list) else [] for name, others in rows}
    return {name: [other for other in others if isinstance(other, str)] for name, others in lists.items()}


def forget() -> None:
    """Drop this process's cache; the next use reads the rows. Other processes do so within MAX_AGE_SECONDS."""
    global _current, _forgotten_at
    with _lock:
        _current, _forgotten_at = NOTHING, time.monotonic()
    _version.cache_clear()
