"""What a new run names, and what the catalogue offers."""

from typing import Any

from config.api.serializers import did_you_mean
from config.kernel.errors import ValidationFailed
from runs import catalogue
from runs.models import RESERVED_TOOL_NAMES, AgentVersion, Tool


def check_offered(
    agent: str | None,
    given: AgentVersion | None,
    model: str | None,
    tools: list[str] | None,
    client_tools: list[dict[str, Any]] | None,
) -> None:
    """Raises ValidationFailed if the run names an agent, model or tool that is not offered to it."""
    offered = catalogue.read()
    agents_model = given.model if given is not None and model is None else None
    if offered.model(agents_model or model) is None or not offered.tools.keys() >= set(tools or ()):
        offered = catalogue.refresh()  # perhaps it was added a moment ago
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
            # Looking for the nearest name takes time, so only the first problem, which `message` shows, has it.
            meant = [] if problems else did_you_mean(name, offered.tools)
            problems[f"tools.{index}"] = [f"There is no tool named {name}.", *meant]
        elif given is not None and given.tools is not None and name not in given.tools:
            problems[f"tools.{index}"] = [f"The agent {given.reference} has no tool named {name}."]
    own = [tool["name"] for tool in client_tools or ()]
    taken = {*RESERVED_TOOL_NAMES, *(Tool.objects.filter(name__in=own).values_list("name", flat=True) if own else ())}
    for index, name in enumerate(own):
        if name in taken:
            problems[f"clientTools.{index}.name"] = [f"The service has a tool named {name}."]
    if problems:
        raise ValidationFailed(problems)
