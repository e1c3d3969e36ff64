"""The types of tools, the one function through which the engine calls a tool, and the trial by which staff call one."""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from django.conf import settings

from config.kernel.ids import new_id
from config.limits.share import Threads
from config.outbound import client
from config.telemetry import tracing
from runs.errors import CallError
from runs.tools import base, builtin, http, mcp
from runs.tools.base import Outcome, Parked, ToolContext, ToolDefinition, ToolFailure, ToolResult, tool_error
from runs.tools.files import store_images
from runs.tools.schema import check_input, parse_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolType:
    """A type of tools. ``execute`` is None for calls that await the caller's app, and for built-in tools, which have
    their own. ``needs_url``: staff must give the tool's address. ``contact`` asks a tool's server about an open parked
    call, or tells it that the call has ended. Both raise ToolFailure.
    """

    label: str
    execute: base.Executor | None
    needs_url: bool
    contact: base.Contact | None = None


TYPES = {
    base.BUILTIN: ToolType("Built in", None, needs_url=False),
    base.HTTP: ToolType("HTTP endpoint", http.execute, needs_url=True, contact=http.tell_end),
    base.CLIENT: ToolType("The caller's app", None, needs_url=False),
    base.MCP: ToolType("MCP server", mcp.execute, needs_url=True, contact=mcp.contact),
}


def type_of(definition: ToolDefinition) -> ToolType | base.BuiltinTool | None:
    """The type or built-in tool that executes the tool's calls; None if there is none."""
    if definition.node_type == base.BUILTIN:
        return builtin.TOOLS.get(definition.name)
    return TYPES.get(definition.node_type)


async def call_tool(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Outcome:
    """Call the tool with a checked input, within its and the run's time. Each failure but a cancel is a ToolFailure."""
    kind = type_of(definition)
    if kind is None or kind.execute is None:
        raise ToolFailure(CallError.UNKNOWN_TOOL, f"There is no {definition.node_type} tool {definition.name}.")
    limit = min(definition.time_limit, context.timeout_seconds)
    try:
        async with asyncio.timeout(limit) as scope:
            with tracing.span("tool", tool=definition.name, **{"invocation.id": context.invocation_id}):
                result = await kind.execute(definition, input, replace(context, timeout_seconds=limit))
                if isinstance(result, Parked):
                    return result
                return base.clean_result(await store_images(context, result))
    except ToolFailure:
        raise
    except Exception as error:
        if scope.expired():
            message = f"{definition.name} did not answer within {limit:g} seconds."
            raise ToolFailure(CallError.TOOL_TIMEOUT, message) from None
        logger.exception("tool %s failed in invocation %s", definition.name, context.invocation_id)
        raise tool_error(f"{definition.name} failed for an unexpected reason.") from error


def try_tool(definition: ToolDefinition, arguments: str, user_id: int, user_name: str) -> dict[str, Any]:
    """One call of an HTTP tool by staff, with ``arguments``, the JSON text of an object. It belongs to no run, and
    nothing is charged or stored. ``result`` (with ``credits``) or ``failure``: what the model would get. ``sent``: the
    call's id, if it was made. ``seconds``: how long it took. Blocks for STAFF_REQUEST_SECONDS at most.
    """
    trial: dict[str, Any] = {}
    begun, threads = time.monotonic(), Threads(1, 1, "trial")
    limit = min(definition.time_limit, settings.STAFF_REQUEST_SECONDS)
    try:
        input = parse_arguments(arguments)
        check_input(definition, input)
        trial["sent"] = new_id("inv")
        client.prepare()
        context = ToolContext(trial["sent"], "trial", "trial", user_id, user_name, limit, threads, threads)
        result = asyncio.run(http.execute(definition, input, context))
        assert isinstance(result, ToolResult)  # noqa: S101  (without a callback no call is parked)
        trial["credits"] = definition.price if result.credit_used is None else result.credit_used
        trial["result"] = base.clean_result(result)
    except ToolFailure as failure:
        trial["failure"] = failure
    finally:
        threads.shutdown()
    return trial | {"seconds": time.monotonic() - begun}
