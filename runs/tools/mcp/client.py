"""One call of a tool of an MCP server, or its list of tools, with the official SDK."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from django.conf import settings
from mcp import Client, MCPError
from mcp.client import ClaimContext, ClientExtension, ResultClaim
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, Implementation, InputRequiredResult, Result, Tool

from config.kernel.jsontext import dumps
from config.outbound.client import check_url
from runs.tools.base import MCP, Outcome, Parked, ToolContext, ToolDefinition, ToolFailure, tool_error
from runs.tools.http import USER_AGENT
from runs.tools.mcp import tasks
from runs.tools.mcp.transport import GuardedTransport
from runs.tools.questions import Dialogue

logger = logging.getLogger(__name__)

LIST_PAGES_MAX = 20  # pages of a list of tools; protects against a list without an end
ROUNDS_MAX = 10  # how often a call is made in a row while its server asks only for things that the user cannot answer
# The pause before the next round if the server asks for nothing at all: it wants to be called again later.
ROUND_SECONDS = 0.25


class Tasks(ClientExtension):
    """Tells servers whose revision has tasks that they may turn a call into a task."""

    identifier = tasks.EXTENSION

    def claims(self) -> list[ResultClaim[tasks.TaskCreated]]:
        return [ResultClaim(result_type="task", model=tasks.TaskCreated, resolve=self._resolve)]

    async def _resolve(self, created: tasks.TaskCreated, context: ClaimContext) -> CallToolResult:
        raise NotImplementedError("Calls are made by the session, which returns what was created.")


async def call(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> Outcome:
    """Call the tool, and call it again while its server only asks for things that are declined. Raises ToolFailure."""
    transport = GuardedTransport(str(context.user_id))
    name = definition.remote_name or definition.name
    async with _connected(definition, transport, context.invocation_id) as client:
        # The SDK remembers the listed tools, because it repeats some arguments in headers.
        async for tool in _tools(client):
            if tool.name == name:
                break
        else:
            raise tool_error(f"The server of {definition.name} has no tool {name}.")
        client.session.validate_tool_result = _unchecked  # type: ignore[method-assign]
        dialogue = Dialogue.from_text(context.remote_task)
        for _ in range(ROUNDS_MAX):
            sent = {"arguments": input, "inputResponses": dialogue.answers or None, "requestState": dialogue.state}
            transport.call = {name: value for name, value in sent.items() if value is not None}
            result: Result = await client.session.call_tool(
                name, json.loads(dumps(input)), allow_input_required=True, allow_claimed=True
            )
            if isinstance(result, CallToolResult):
                return tasks.read_result(definition, result)
            if isinstance(result, tasks.TaskCreated):
                return tasks.parked(result, dialogue)
            if not isinstance(result, InputRequiredResult):
                break
            asked = result.model_dump(by_alias=True, mode="json", exclude_none=True).get("inputRequests")
            dialogue = dialogue.when_told(result.request_state)
            if asked:
                dialogue = await tasks.with_requests(dialogue, asked)
            else:
                await asyncio.sleep(ROUND_SECONDS)
            if dialogue.questions:
                return Parked(remote_task=dialogue.to_text())
    raise tool_error(f"{definition.name} asks for the same again and again.")


async def list_tools(url: str, headers: Mapping[str, str]) -> list[Tool]:
    """All tools of a server. Raises ToolFailure."""
    server = ToolDefinition("The server", "", "", MCP, {}, 0, url=url, secret_headers=headers)
    limit = settings.STAFF_REQUEST_SECONDS
    try:
        async with asyncio.timeout(limit), _connected(server, GuardedTransport("")) as client:
            tools = [tool async for tool in _tools(client)]
    except TimeoutError:
        raise tool_error(f"The server did not answer within {limit:g} seconds.") from None
    return tools


@contextlib.asynccontextmanager
async def _connected(definition: ToolDefinition, transport: GuardedTransport, key: str = "") -> AsyncIterator[Client]:
    """A client of the tool's server. ``key``: the idempotency key of the call. Failures of the connection and of the
    work with it become ToolFailure. After the work is done, a failure while the connection closes does not matter.
    """
    headers = {**definition.secret_headers, "User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    headers |= {"Idempotency-Key": key} if key else {}
    is_done = False
    try:
        check_url(definition.url, allow_private=True)  # the form only; the transport checks the address
        async with httpx2.AsyncClient(transport=transport, headers=headers, trust_env=False) as http:
            most = settings.TOOL_ANSWER_MAX_BYTES
            streams = streamable_http_client(definition.url, http_client=http, max_sse_event_size=most)
            who = Implementation(name=USER_AGENT, version="1.0.0")
            extensions = [] if definition.park_seconds is None else [Tasks()]
            async with Client(streams, client_info=who, cache=None, extensions=extensions) as client:
                yield client
                is_done = True
    except Exception as error:
        if not is_done:
            raise _failure(definition, transport, error) from None
    if not is_done:
        raise tool_error(f"{definition.name} did not answer.")


def _failure(definition: ToolDefinition, transport: GuardedTransport, error: BaseException) -> Exception:
    """The first failure: that of the transport, or else the server's own error."""
    name = definition.name
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolFailure | TimeoutError):
        return error
    if transport.problem is not None:
        return tool_error(f"{name}: {transport.problem}")
    if transport.status_code > 400:  # an error of the protocol has status 400, and its message says more
        return tool_error(f"{name} answered with HTTP status {transport.status_code}.")
    if isinstance(error, MCPError):
        return tool_error(f"{name} answered with an error: {definition.without_secrets(error.message)}")
    # Details are for staff, who import a list of tools for no user; a model does not get such details.
    if isinstance(error, ValueError) and not transport.owner:
        return tool_error(f"{name}: {definition.without_secrets(str(error))}")
    logger.warning("MCP server of %s failed", name, exc_info=error)
    return tool_error(f"{name} broke the MCP protocol.")


async def _unchecked(name: str, result: CallToolResult) -> None:
    """Replaces the SDK's check against the server's own output schema, which could block the process for ever."""


async def _tools(client: Client) -> AsyncIterator[Tool]:
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield tool
        cursor = page.next_cursor
        if cursor is None:
            break
