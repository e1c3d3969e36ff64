"""Results of MCP servers' tools, and tasks (SEP-2663, revision 2026-07-28): calls whose outcome the server is asked for
later. Each look at a task is one POST, without the SDK and without a session: there may be thousands of tasks.
"""

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urljoin

import mcp_types
from mcp.shared.inbound import encode_header_value
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent, TextResourceContents
from pydantic import ValidationError

from config.kernel.jsontext import dumps
from config.outbound.addresses import RequestFailed, same_server
from config.outbound.client import Answer
from runs.errors import CallError
from runs.tools import base
from runs.tools.base import Outcome, Parked, ToolContext, ToolDefinition, ToolFailure, ToolResult, tool_error
from runs.tools.files import image_of
from runs.tools.http import USER_AGENT, is_too_long, send
from runs.tools.mcp.transport import require_readable
from runs.tools.questions import Dialogue, is_storable

logger = logging.getLogger(__name__)

EXTENSION = "io.modelcontextprotocol/tasks"
REVISION = "2026-07-28"
# What the server is told of this client: it may use no other capabilities.
META: Mapping[str, Any] = {
    mcp_types.PROTOCOL_VERSION_META_KEY: REVISION,
    mcp_types.CLIENT_INFO_META_KEY: {"name": USER_AGENT, "version": "1.0.0"},
    mcp_types.CLIENT_CAPABILITIES_META_KEY: {"elicitation": {"form": {}}, "extensions": {EXTENSION: {}}},
}

POLL_MIN_SECONDS, POLL_MAX_SECONDS = 1.0, 300.0  # limits of the server's `pollIntervalMs`
# Without `pollIntervalMs`, or an answer of the server, intervals double from the first to the second of these.
POLL_FIRST_SECONDS, POLL_GROWN_SECONDS = 5.0, 60.0
TASK_REQUEST_SECONDS = 30.0  # the time of one request about a task
TASK_ID_MAX_CHARS = 1000

# Schemas of questions are checked one at a time: they are rare, and hostile ones then only delay each other. They do
# not wait for the user's thread for tools, which other calls may occupy for longer than this call may take.
_checks = ThreadPoolExecutor(1, "mcp-questions")


class Away(Exception):
    """There was no answer about the task. The message is for logs."""


class Refused(Exception):
    """The server answered with an error of JSON-RPC. The argument is its code."""


class TaskCreated(mcp_types.Result):
    """The result of a call that its server has turned into a task. Only the id of it is checked."""

    result_type: Literal["task"]
    task_id: str
    status_message: Any = None
    poll_interval_ms: Any = None


def parked(created: TaskCreated, before: Dialogue) -> Parked:
    """A new task. Requests of the server in the dialogue ``before`` count, too. Raises ToolFailure."""
    task_id = created.task_id
    if not task_id or not is_storable(task_id, TASK_ID_MAX_CHARS):
        raise tool_error("The tool's server gave the call's task an id that cannot be used.")
    interval = _interval(created.poll_interval_ms, None)
    dialogue = Dialogue(task_id, interval=interval, requests=before.requests, answered=before.answered)
    return _open(dialogue, created.status_message)


async def contact(definition: ToolDefinition, context: ToolContext) -> Outcome | None:
    """Ask for the outcome of an open call. For an ended call, try once to cancel its task. Raises ToolFailure."""
    dialogue = Dialogue.from_text(context.remote_task)
    if context.end_reason:
        try:
            if dialogue.task_id:
                await _request(definition, context, "tasks/cancel", dialogue.task_id)
        except (Away, Refused, ToolFailure) as error:
            logger.info("the task of call %s was not cancelled: %s", context.invocation_id, error)
        return None
    try:
        dialogue = await _tell(definition, context, dialogue)
        task = await _request(definition, context, "tasks/get", dialogue.task_id)
        if task.get("taskId") != dialogue.task_id:
            raise Away("an answer about another task")
        if result := _outcome(definition, task):
            return result
        dialogue = replace(dialogue, interval=_interval(task.get("pollIntervalMs"), dialogue.interval))
        requests = task.get("inputRequests")
        if task["status"] == "input_required" and isinstance(requests, dict):
            dialogue = await _tell(definition, context, await with_requests(dialogue, requests))
        return _open(dialogue, task.get("statusMessage"))
    except (Away, Refused) as error:
        if error.args == (mcp_types.INVALID_PARAMS,):
            message = f"The server of {definition.name} does not know the call's task any more."
            raise ToolFailure(CallError.OUTCOME_UNKNOWN, message) from None
        logger.info("the server of the task of call %s is away: %s", context.invocation_id, error)
    interval = max(_interval(None, dialogue.interval), dialogue.interval or 0)  # no more often than its server wants
    return _open(replace(dialogue, interval=interval), None)


def _open(dialogue: Dialogue, said: Any) -> Parked:
    text = base.shorten(base.clean_text(said).strip(), base.PROGRESS_MAX_CHARS) if isinstance(said, str) else ""
    interval = None if dialogue.questions else dialogue.interval
    return Parked(text, remote_task=dialogue.to_text(), contact_in_seconds=interval)


async def with_requests(dialogue: Dialogue, requests: Mapping[str, Any]) -> Dialogue:
    return await asyncio.get_running_loop().run_in_executor(_checks, dialogue.with_requests, requests)


async def _tell(definition: ToolDefinition, context: ToolContext, dialogue: Dialogue) -> Dialogue:
    """Send the answers, if there are any. If the server refuses them, it may ask again."""
    if not dialogue.answers:
        return dialogue
    try:
        await _request(definition, context, "tasks/update", dialogue.task_id, inputResponses=dialogue.answers)
    except Refused:
        return replace(dialogue, answers={})
    return dialogue.when_told()


def _outcome(definition: ToolDefinition, task: Mapping[str, Any]) -> ToolResult | None:
    """The result of a task; None if it has not ended. Raises ToolFailure, Away."""
    name, status = definition.name, task.get("status")
    if status == "completed":
        try:
            return read_result(definition, CallToolResult.model_validate(task.get("result"), by_name=False))
        except ValidationError:
            raise tool_error(f"{name} broke the MCP protocol.") from None
    if status in ("failed", "cancelled"):
        error = task.get("error")
        said = (error.get("message") if isinstance(error, dict) else None) or task.get("statusMessage")
        reason = f": {definition.without_secrets(said)}" if isinstance(said, str) and said else "."
        raise tool_error(f"{name} {'failed' if status == 'failed' else 'was cancelled by its server'}{reason}")
    if status not in ("working", "input_required"):
        raise Away("a status that does not exist")
    return None


def read_result(definition: ToolDefinition, result: CallToolResult) -> ToolResult:
    """Text unchanged, links as addresses, images, and for other content only its type. Raises ToolFailure."""
    parts, urls, images = list[str](), list[str](), list[base.ToolImage]()
    for block in result.content:
        content = getattr(block, "resource", block)  # an embedded resource has the content of one
        if isinstance(content, TextContent | TextResourceContents):
            parts.append(content.text)
        elif isinstance(content, ResourceLink):
            uri = str(content.uri)
            urls += [uri] if base.is_address(uri) else []
            parts.append(f"{content.title or content.name}: {uri}")
        elif image := _image(content):
            images.append(image)
        else:
            parts.append(f"[{getattr(content, 'mime_type', None) or block.type}, which is not text]")
    if not parts and result.structured_content is not None:
        parts.append(base.result_text(definition.name, result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise tool_error(definition.without_secrets(text) or f"{definition.name} failed.")
    return ToolResult(text, tuple(urls), images=tuple(images))


def _image(content: Any) -> base.ToolImage | None:
    """The image of a content whose data is base64 text; None for other content."""
    data = content.data if isinstance(content, ImageContent) else getattr(content, "blob", "")
    with contextlib.suppress(ValueError):
        return image_of(base64.b64decode(data, validate=True), getattr(content, "mime_type", None) or "")
    return None


def _interval(given: Any, before: float | None) -> float:
    """Seconds until the next look. ``given``: the server's `pollIntervalMs`; ``before``: the last interval."""
    if type(given) in (int, float):
        # ``max`` first, with ``given`` second: this also handles NaN and integers that are too large for a float.
        return min(max(POLL_MIN_SECONDS * 1000, given), POLL_MAX_SECONDS * 1000) / 1000
    return min(max(POLL_FIRST_SECONDS, 2 * (before or 0)), POLL_GROWN_SECONDS)


async def _request(
    definition: ToolDefinition, context: ToolContext, method: str, task_id: str, **params: Any
) -> dict[str, Any]:
    """The result of the request. Raises Away, Refused, or ToolFailure for an answer that is too large."""
    told = {"taskId": task_id, **params, "_meta": META}
    body = dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": told})
    headers = {
        **definition.secret_headers,
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        "MCP-Protocol-Version": REVISION,
        "Mcp-Method": method,
        "Mcp-Name": encode_header_value(task_id),
    }
    sent: dict[str, Any] = {"headers": headers, "body": body, "seconds": TASK_REQUEST_SECONDS, "reuse": True}
    try:
        answer = await send(context.user_id, definition.url, **sent)
        if answer.status in (307, 308):  # the SDK follows such redirects of calls, too
            with contextlib.suppress(ValueError):
                target = urljoin(definition.url, answer.headers.get("Location", ""))
                if same_server(definition.url, target):
                    answer = await send(context.user_id, target, **sent)
    except ToolFailure as failure:
        raise Away(failure.message) from None
    return _read(definition, answer)


def _read(definition: ToolDefinition, answer: Answer) -> dict[str, Any]:
    try:
        require_readable(answer.body, is_too_long(answer))
    except RequestFailed as error:
        raise tool_error(f"{definition.name}: {error}") from None
    kind = answer.headers.get("Content-Type", "").lower()
    for text in _events(answer.body) if kind.startswith("text/event-stream") else [answer.body]:
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(text)
        if not isinstance(message, dict) or message.get("id") not in (1, None):
            continue
        if isinstance(message.get("error"), dict):
            code = message["error"].get("code")
            raise Refused(code if type(code) is int else None)
        if isinstance(message.get("result"), dict) and message.get("id") == 1 and answer.status < 400:
            return message["result"]
    raise Away(f"no answer of the protocol, with HTTP status {answer.status}")


def _events(body: bytes) -> Iterator[bytes]:
    """The data of each event."""
    for event in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        yield b"\n".join(line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
