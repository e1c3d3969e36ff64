"""``python -m tests.tools.mcp_server PORT [legacy]``: an MCP server that uses the official SDK.

Its tools cover the kinds of results. With ``legacy`` it refuses the newest revision of the protocol. A call of
``research`` is a task of the extension of SEP-2663, whose state lives as long as the process.
"""

import asyncio
import json
import sys
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import uvicorn
from mcp import MCPError
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    BlobResourceContents,
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    ImageContent,
    InputRequiredResult,
    RequestParams,
    ResourceLink,
    TextContent,
)

PNG = b"\x89PNG\r\n\x1a\nimage"
TASKS = "io.modelcontextprotocol/tasks"
NAME_FORM: dict[str, Any] = {
    "mode": "form",
    "message": "For whom?",
    "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


class TaskParams(RequestParams):
    task_id: str
    input_responses: dict[str, Any] = {}


class Tasks(Extension):
    """Each call of ``research`` works for ``seconds``; with ``asks`` it then asks for a name."""

    identifier = TASKS

    def __init__(self) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}

    def methods(self) -> Sequence[MethodBinding]:
        handlers = {"tasks/get": self.look, "tasks/update": self.update, "tasks/cancel": self.cancel}
        return [MethodBinding(method, TaskParams, handler) for method, handler in handlers.items()]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        if params.name != "research":
            return await call_next(ctx)
        self._require_declared(ctx)
        arguments: Any = params.arguments
        task_id = uuid4().hex
        self.tasks[task_id] = {"until": time.monotonic() + arguments["seconds"], **arguments, "name": None}
        return {"resultType": "task", **self._shown(task_id, "working")}

    async def look(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        self._require_declared(ctx)
        task = self._task(params)
        if task.get("cancelled"):
            return self._shown(params.task_id, "cancelled")
        if time.monotonic() < task["until"]:
            return self._shown(params.task_id, "working", statusMessage="Reading")
        if task.get("asks") and task["name"] is None:
            request = {"method": "elicitation/create", "params": NAME_FORM}
            return self._shown(params.task_id, "input_required", inputRequests={"name": request})
        text = f"All about {task['topic']}, for {task['name'] or 'everybody'}"
        result = {"resultType": "complete", "content": [{"type": "text", "text": text}]}
        return self._shown(params.task_id, "completed", result=result)

    async def update(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        self._require_declared(ctx)
        answer = params.input_responses["name"]
        self._task(params)["name"] = answer["content"]["name"] if answer["action"] == "accept" else "nobody"
        return {}

    async def cancel(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        self._require_declared(ctx)
        self._task(params)["cancelled"] = True
        return {}

    def _task(self, params: TaskParams) -> dict[str, Any]:
        if params.task_id not in self.tasks:
            raise MCPError(INVALID_PARAMS, "Task not found")
        return self.tasks[params.task_id]

    def _shown(self, task_id: str, status: str, **fields: Any) -> dict[str, Any]:
        at = "2026-11-24T05:00:00Z"
        known = {"taskId": task_id, "status": status, "createdAt": at, "lastUpdatedAt": at, "ttlMs": None}
        return {**known, "pollIntervalMs": 1000, **fields}

    def _require_declared(self, ctx: ServerRequestContext[Any, Any]) -> None:
        declared = (ctx.meta or {}).get("io.modelcontextprotocol/clientCapabilities", {})
        if TASKS not in declared.get("extensions", {}):
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "Missing required client capability")


server = MCPServer("test tools", extensions=[Tasks()])


@server.tool()
def research(topic: str, seconds: float, asks: bool = False) -> str:
    """Takes long."""
    raise NotImplementedError("Its calls are tasks.")


@server.tool()
def greet(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Asks for a name before it answers."""
    given = (ctx.input_responses or {}).get("who")
    if given is None:
        form = ElicitRequestFormParams(message=NAME_FORM["message"], requested_schema=NAME_FORM["requestedSchema"])
        return InputRequiredResult(input_requests={"who": ElicitRequest(params=form)}, request_state="first")
    assert isinstance(given, ElicitResult)
    return f"Hello {given.content['name']}" if given.content else "Hello nobody"


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(name="remote.name")
def named() -> str:
    """Has a name that the catalogue does not allow."""
    return "by its own name"


@server.tool()
def headers(ctx: Context[Any, Any]) -> str:
    """Returns the headers of the call."""
    request = ctx.request_context.request
    assert request is not None
    return json.dumps(dict(request.headers))


@server.tool()
def report() -> CallToolResult:
    return CallToolResult(
        content=[
            TextContent(type="text", text="Here it is."),
            ResourceLink(type="resource_link", name="chart", uri="https://files.example/chart.svg"),
            ResourceLink(type="resource_link", name="note", uri="note://1"),
            ImageContent(type="image", data="aGk=", mime_type="image/png"),
            ImageContent(type="image", data=b64encode(PNG).decode(), mime_type="image/png"),
            EmbeddedResource(
                type="resource",
                resource=BlobResourceContents(uri="file://a", mime_type="image/png", blob=b64encode(PNG).decode()),
            ),
            EmbeddedResource(
                type="resource", resource=BlobResourceContents(uri="file://b", mime_type="application/pdf", blob="aGk=")
            ),
            EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file://c", blob="aGk=")),
        ]
    )


@server.tool()
def refuse(reason: str) -> None:
    raise MCPError(-32000, reason)


@server.tool()
def fail(reason: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=reason)], is_error=True)


@server.tool()
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "at last"


@server.tool()
async def with_progress(ctx: Context[Any, Any]) -> str:
    """Reports progress before the result, so that the answer is a stream."""
    await ctx.report_progress(1, 2)
    return "streamed"


@server.tool()
def large(size: int) -> str:
    return "x" * size


class Legacy:
    """Middleware that refuses requests of the newest revision, as an older server does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (b"mcp-protocol-version", b"2026-07-28") in scope.get("headers", ()):
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"Bad Request: Unsupported protocol version"})
            return
        await self.app(scope, receive, send)


if __name__ == "__main__":
    app: Any = server.streamable_http_app()
    if "legacy" in sys.argv:
        app = Legacy(app)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
