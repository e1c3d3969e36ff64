"""The built-in tool ``long_job``: work that takes longer than a request, for tests and first steps."""

import json
from typing import Any

from config.kernel import clock
from config.kernel.money import MICRO
from runs.tools.base import BuiltinTool, Parked, ToolContext, ToolDefinition, ToolResult, input_object, tool_error

PARK_SECONDS = 600
MARGIN_SECONDS = 10  # the job ends a little before the time of the parked call
STEPS = 4


async def begin(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Parked:
    if context.park_until is None:
        raise tool_error("long_job needs parkSeconds.")
    seconds = min(float(input["seconds"]), PARK_SECONDS - MARGIN_SECONDS)
    task = json.dumps({"seconds": seconds, "begun": clock.now().timestamp()})
    return Parked("It has begun.", remote_task=task, contact_in_seconds=seconds / STEPS)


async def look(definition: ToolDefinition, context: ToolContext) -> ToolResult | Parked | None:
    """The progress at each quarter of the time, then the result."""
    if context.end_reason:
        return None
    task = json.loads(context.remote_task)
    seconds, past = task["seconds"], clock.now().timestamp() - task["begun"]
    if past >= seconds:
        return ToolResult(f"The job took {seconds:g} seconds.")
    fraction = round(past / seconds, 2)
    left = min(seconds / STEPS, seconds - past)
    return Parked(f"{past:.0f} of {seconds:g} seconds", fraction, contact_in_seconds=left)


TOOL = BuiltinTool(
    name="long_job",
    display_name="Long job",
    description="Does nothing for some seconds, up to ten minutes, without a worker. For tests.",
    input_schema=input_object(seconds={"type": "number", "minimum": 0, "maximum": PARK_SECONDS}),
    price=2 * MICRO,
    execute=begin,
    park_seconds=PARK_SECONDS,
    contact=look,
)
