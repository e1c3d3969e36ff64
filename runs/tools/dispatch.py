"""The one door through which the engine calls tools: by node type, within a time limit, every outcome made safe."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from django.conf import settings

from config.telemetry import tracing
from runs.tools import builtin, http, mcp
from runs.tools.base import (
    TOOL_ERROR,
    TOOL_TIMEOUT,
    UNKNOWN_TOOL,
    Executor,
    ToolContext,
    ToolDefinition,
    ToolFailure,
    ToolResult,
    clean_result,
)

logger = logging.getLogger(__name__)

EXECUTORS: dict[str, Executor] = {"builtin": builtin.execute, "http": http.execute, "mcp": mcp.execute}


async def call_tool(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Calls the tool with an input that ``parse_input`` has passed.

    Raises ToolFailure for every failure (``TOOL_TIMEOUT`` past the time limit), and only lets a cancellation through.
    """
    execute = EXECUTORS.get(definition.node_type)
    if execute is None:
        raise ToolFailure(UNKNOWN_TOOL, f"There is no way to call tools of the type {definition.node_type}.")
    own_limit = settings.TOOL_TIMEOUT_SECONDS if definition.timeout_seconds is None else definition.timeout_seconds
    limit = min(own_limit, context.timeout_seconds)
    try:
        async with asyncio.timeout(limit) as scope:
            with tracing.span("tool", tool=definition.name, **{"invocation.id": context.invocation_id}):
                return clean_result(await execute(definition, input, replace(context, timeout_seconds=limit)))
    except ToolFailure:
        raise
    except Exception as error:
        if scope.expired():
            raise ToolFailure(TOOL_TIMEOUT, f"{definition.name} did not answer within {limit:g} seconds.") from None
        logger.exception("Tool %s failed in invocation %s", definition.name, context.invocation_id)
        raise ToolFailure(TOOL_ERROR, f"{definition.name} failed for an unexpected reason.") from error
