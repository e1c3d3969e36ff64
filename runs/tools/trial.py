"""One call of an HTTP tool by staff, who see the answer. It belongs to no run, and nothing is charged or stored."""

import asyncio
import time
from dataclasses import dataclass

from django.conf import settings

from config.kernel.ids import new_id
from config.limits.share import Threads
from config.outbound import client
from runs.tools import http
from runs.tools.base import ToolContext, ToolDefinition, ToolFailure, ToolResult, clean_result
from runs.tools.schema import check_input, parse_arguments


@dataclass
class Trial:
    """``result`` or ``failure``: what the model would get. ``sent``: the call's id; empty if no call was made."""

    seconds: float = 0.0
    sent: str = ""
    result: ToolResult | None = None
    failure: ToolFailure | None = None


def try_tool(definition: ToolDefinition, arguments: str, user_id: int, user_name: str) -> Trial:
    """Call the tool with ``arguments``, a JSON object as text. Blocks for STAFF_REQUEST_SECONDS at most."""
    trial, begun, threads = Trial(), time.monotonic(), Threads(1, 1, "trial")
    limit = min(definition.time_limit, settings.STAFF_REQUEST_SECONDS)
    try:
        input = parse_arguments(arguments)
        check_input(definition, input)
        trial.sent = new_id("inv")
        client.prepare()
        context = ToolContext(trial.sent, "trial", "trial", user_id, user_name, limit, threads, threads)
        result = asyncio.run(http.execute(definition, input, context))
        assert isinstance(result, ToolResult)  # noqa: S101  (without a callback no call is parked)
        trial.result = clean_result(result)
    except ToolFailure as failure:
        trial.failure = failure
    finally:
        threads.shutdown()
    trial.seconds = time.monotonic() - begun
    return trial
