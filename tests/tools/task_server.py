"""An MCP server of revision 2026-07-28 with tasks (SEP-2663), whose answers the tests decide."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import serving

REVISION = "2026-07-28"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
EXTENSION = "io.modelcontextprotocol/tasks"
DISCOVERED = {
    "resultType": "complete",
    "supportedVersions": [REVISION],
    "capabilities": {"tools": {}, "extensions": {EXTENSION: {}}},
    "ttlMs": 0,
    "cacheScope": "private",
}
TIMES = {"createdAt": "2026-11-24T05:00:00Z", "lastUpdatedAt": "2026-11-24T05:00:00Z", "ttlMs": None}


class Refusal(Exception):
    """Answered as an error of JSON-RPC, with the HTTP status 400."""

    def __init__(self, code: int, message: str = "no") -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message}


@dataclass
class TaskServer:
    """``tool`` answers calls, ``task`` looks at tasks: each with the request's params. Both may raise Refusal, and
    may return bytes as the whole body of the answer.
    """

    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    tool: Callable[[dict[str, Any]], Any] = lambda params: task("t-1", pollIntervalMs=1000) | {"resultType": "task"}
    task: Callable[[dict[str, Any]], Any] = lambda params: task(params["taskId"])
    # Set to send requests with any other path here, by a redirect.
    path: str = ""
    # Set to answer with this HTTP status.
    status: int | None = None
    as_events: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, method: str) -> list[dict[str, Any]]:
        """The params of these requests."""
        return [params for name, params in self.requests if name == method]

    def answer(self, method: str, params: dict[str, Any]) -> Any:
        if method == "server/discover":
            return DISCOVERED
        if method == "tools/list":
            tools = [{"name": "research", "inputSchema": {"type": "object"}}]
            return {"resultType": "complete", "tools": tools, "ttlMs": 0, "cacheScope": "private"}
        if method == "tools/call":
            return self.tool(params)
        if method == "tasks/get":
            return self.task(params)
        if method in ("tasks/update", "tasks/cancel"):
            return {"resultType": "complete"}
        raise Refusal(-32601)


def task(task_id: str, status: str = "working", **fields: Any) -> dict[str, Any]:
    return {"resultType": "complete", "taskId": task_id, "status": status, **TIMES, **fields}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"resultType": "complete", "content": [{"type": "text", "text": said}], **fields}


def completed(task_id: str, said: str, **fields: Any) -> dict[str, Any]:
    return task(task_id, "completed", result=text(said), **fields)


def form(message: str, schema: Any = None, **params: Any) -> dict[str, Any]:
    """An input request of a server: a form for the user."""
    schema = schema or {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    return {"method": "elicitation/create", "params": {"message": message, "requestedSchema": schema, **params}}


def asks(state: str | None = None, **requests: Any) -> dict[str, Any]:
    """The result of a call that needs input first."""
    result: dict[str, Any] = {"resultType": "input_required"}
    if requests:
        result["inputRequests"] = requests
    return result | ({} if state is None else {"requestState": state})


@contextlib.contextmanager
def task_server() -> Iterator[TaskServer]:
    server = TaskServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            method, params = asked["method"], asked.get("params", {})
            if server.path and self.path != server.path:
                self.send_response(307)
                self.send_header("Location", server.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if "id" not in asked:
                self._answer(202, b"")
                return
            with server.lock:
                server.requests.append((method, params))
                server.headers.append(dict(self.headers.items()))
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
            status = 200
            try:
                self._check(method, params)
                result = server.answer(method, params)
                if isinstance(result, bytes):
                    self._answer(server.status or 200, result)
                    return
                answer["result"] = result
            except Refusal as refusal:
                answer["error"], status = refusal.error, 400
            if server.status is not None and method not in ("server/discover", "tools/list"):
                self._answer(server.status, b"<html>")
                return
            self._answer(status, json.dumps(answer).encode())

        def _check(self, method: str, params: dict[str, Any]) -> None:
            """What the revision demands of every request."""
            name = params.get("taskId") if method.startswith("tasks/") else params.get("name")
            meta = params["_meta"]
            assert self.headers["MCP-Protocol-Version"] == meta["io.modelcontextprotocol/protocolVersion"] == REVISION
            assert self.headers["Mcp-Method"] == method
            assert self.headers.get("Mcp-Name") == name
            if method.startswith("tasks/") and EXTENSION not in meta[CAPABILITIES].get("extensions", {}):
                raise Refusal(-32021, "Missing required client capability")

        def _answer(self, status: int, body: bytes) -> None:
            kind = "application/json"
            if server.as_events and status == 200:
                body, kind = b": hello\n\nevent: message\ndata: " + body + b"\n\n", "text/event-stream"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_DELETE(self) -> None:
            self.send_error(405)

        do_GET = do_DELETE

        def log_message(self, *args: Any) -> None:
            pass

    with serving(Handler) as url:
        server.url = f"{url}/mcp"
        yield server
