"""One call of a tool of an MCP server, or its list of tools, with the official SDK.

The package imports this module when it is first needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx2
from django.conf import settings
from mcp import Client, MCPError
from mcp.client import ClaimContext, ClientExtension, ResultClaim
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, Implementation, InputRequiredResult, Result, Tool
from pydantic import ValidationError

from config.kernel.jsontext import dumps
from config.outbound.client import check_url
from runs.tools.base import (
    Asked,
    Outcome,
    ToolContext,
    ToolDefinition,
    ToolFailure,
    in_thread,
    secrets_in,
    tool_error,
    without_secrets,
)
from runs.tools.http import USER_AGENT
from runs.tools.mcp import tasks
from runs.tools.mcp.result import read_result
from runs.tools.mcp.transport import GuardedTransport
from runs.tools.questions import Dialogue

logger = logging.getLogger(__name__)

# A server may list its tools on pages. The limit protects from a list without an end.
LIST_PAGES_MAX = 20
# How often a call is made again at once, because its server asks for nothing that the user could answer.
ROUNDS_MAX = 10
# Before it is made again for a server that asks for nothing at all: it wants to be asked later.
ROUND_SECONDS = 0.25


class Tasks(ClientExtension):
    """Declares that a server may make a task of a call, to servers of a revision that has tasks."""

    identifier = tasks.EXTENSION

    def claims(self) -> list[ResultClaim[tasks.TaskCreated]]:
        return [ResultClaim(result_type="task", model=tasks.TaskCreated, resolve=self._resolve)]

    async def _resolve(self, created: tasks.TaskCreated, context: ClaimContext) -> CallToolResult:
        raise NotImplementedError("Calls are made by the session, which returns what was created.")


async def call(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Outcome:
    """Call the tool. Raises ToolFailure. The caller limits the time by a cancellation."""
    transport = GuardedTransport(str(context.user_id))
    extensions = [] if definition.park_seconds is None else [Tasks()]
    result: Outcome | None = None
    try:
        headers = {**definition.secret_headers, "Idempotency-Key": context.invocation_id}
        async with connected(definition.url, headers, transport, extensions) as client:
            result = await _make(client, transport, definition, input, context)
    except Exception as error:
        # The result is complete, so a failure while the connection closes does not matter.
        if result is None:
            raise failure_of(definition.name, transport, error, definition.without_secrets) from None
    if result is None:
        raise tool_error(f"{definition.name} did not answer.")
    return result


async def _make(
    client: Client,
    transport: GuardedTransport,
    definition: ToolDefinition,
    input: dict[str, Any],
    context: ToolContext,
) -> Outcome:
    """Call the tool, again where its server asks for something that is declined."""
    name = definition.remote_name or definition.name
    await find_tool(client, definition, name)
    dialogue = Dialogue.from_text(context.remote_task)
    for _ in range(ROUNDS_MAX):
        transport.call_with(input, dialogue)
        result: Result = await client.session.call_tool(
            name, json.loads(dumps(input)), allow_input_required=True, allow_claimed=True
        )
        if isinstance(result, CallToolResult):
            return read_result(definition, result)
        if isinstance(result, tasks.TaskCreated):
            return tasks.parked(result, dialogue)
        if not isinstance(result, InputRequiredResult):
            break
        asked = {
            key: request.model_dump(by_alias=True, mode="json", exclude_none=True)
            for key, request in (result.input_requests or {}).items()
        }
        dialogue = dialogue.when_told().with_state(result.request_state)
        if asked:
            dialogue = await in_thread(context, dialogue.with_requests, asked)
        else:
            await asyncio.sleep(ROUND_SECONDS)
        if dialogue.questions:
            return Asked(dialogue.to_text())
    raise tool_error(f"{definition.name} asks for the same again and again.")


async def list_tools(url: str, headers: Mapping[str, str]) -> list[Tool]:
    """All tools of a server. Raises ToolFailure."""
    transport = GuardedTransport()
    limit = settings.STAFF_REQUEST_SECONDS
    found: list[Tool] = []
    complete = False
    try:
        async with asyncio.timeout(limit), connected(url, headers, transport) as client:
            async for tools in pages(client):
                found += tools
            complete = True
    except TimeoutError:
        if not complete:
            raise tool_error(f"The server did not answer within {limit:g} seconds.") from None
    except Exception as error:
        if not complete:
            redact = partial(without_secrets, secrets=secrets_in("", headers.values()))
            raise failure_of("The server", transport, error, redact) from None
    return found


@contextlib.asynccontextmanager
async def connected(
    url: str, headers: Mapping[str, str], transport: GuardedTransport, extensions: Sequence[ClientExtension] = ()
) -> AsyncIterator[Client]:
    check_url(url, allow_private=True)  # the form only; the transport checks the address
    headers = {**headers, "User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    async with httpx2.AsyncClient(transport=transport, headers=headers, trust_env=False) as http:
        streams = streamable_http_client(url, http_client=http, max_sse_event_size=settings.TOOL_ANSWER_MAX_BYTES)
        who = Implementation(name=USER_AGENT, version="1.0.0")
        async with Client(streams, client_info=who, cache=None, extensions=extensions) as client:
            yield client


async def pages(client: Client) -> AsyncIterator[list[Tool]]:
    """The server's tools, page by page."""
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        yield page.tools
        cursor = page.next_cursor
        if cursor is None:
            break


async def find_tool(client: Client, definition: ToolDefinition, name: str) -> None:
    """Find the tool before the call: otherwise the SDK asks for its schemas after the call."""
    async for tools in pages(client):
        if any(tool.name == name for tool in tools):
            return
    raise tool_error(f"The server of {definition.name} has no tool {name}.")


def failure_of(
    name: str, transport: GuardedTransport, error: BaseException, redact: Callable[[str], str]
) -> ToolFailure:
    """The first failure: that of the transport, else the server's own error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolFailure):
        return error
    if transport.problem is not None:
        return tool_error(f"{name}: {transport.problem}")
    if transport.status_code > 400:  # an error of the protocol has status 400, and its message says more
        return tool_error(f"{name} answered with HTTP status {transport.status_code}.")
    if isinstance(error, MCPError):
        return tool_error(f"{name} answered with an error: {redact(error.message)}")
    if isinstance(error, ValidationError) and transport.call is not None:  # staff read more of a wrong list of tools
        return tool_error(f"{name} broke the MCP protocol.")
    if isinstance(error, ValueError):
        return tool_error(f"{name}: {redact(str(error))}")
    logger.warning("MCP tool %s failed", name, exc_info=error)
    return tool_error(f"{name} broke the MCP protocol.")
