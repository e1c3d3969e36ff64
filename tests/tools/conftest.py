"""Fixtures with a real HTTP server on loopback, and with tool calls in the way of the engine."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.test import override_settings

from config.limits.share import Threads
from runs.tools.base import ToolContext, ToolDefinition, ToolResult
from runs.tools.builtin import TOOLS
from runs.tools.dispatch import call_tool
from runs.tools.schema import check_input, parse_arguments
from tests.http_server import serving


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """An HTTP server that gives configured answers and records its requests."""

    url: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    body: bytes = b""
    routes: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    # Set this event to release an answer that is held: any, or those of some paths.
    release: threading.Event = field(default_factory=threading.Event)
    hold: bool = False
    held: set[str] = field(default_factory=set)

    def callback(self, at: int = -1) -> str:
        """The path of the callback address of a request."""
        return urlsplit(self.received[at].json["callback"]["url"]).path

    def answers(self, value: Any) -> None:
        self.body = value if isinstance(value, bytes) else json.dumps(value).encode()


def parse_input(definition: ToolDefinition, arguments: str) -> dict[str, Any]:
    """The input of a call, as the engine reads and checks it."""
    input = parse_arguments(arguments)
    check_input(definition, input)
    return input


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            state.received.append(Received(self.command, self.path, dict(self.headers.items()), body))
            state.arrived.set()
            if state.hold or self.path in state.held:
                state.release.wait(30)
            status, headers, content = state.routes.get(self.path, (state.status, state.headers, state.body))
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # the caller disconnected

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    with serving(Handler) as url:
        state = Server(url)
        yield state
        state.release.set()


@pytest.fixture
def context() -> Iterator[ToolContext]:
    threads = Threads(4, 2, "tool")
    yield ToolContext("inv_1", "run_1", "chat_1", 1, "ada", 20.0, threads, threads)
    threads.shutdown()


@pytest.fixture
def call(context: ToolContext) -> Callable[..., ToolResult]:
    """``call(definition or name of a built-in tool, input)`` parses the input and calls the tool like the engine."""

    def run(tool: str | ToolDefinition, input: Any, context: ToolContext = context) -> ToolResult:
        definition = builtin(tool) if isinstance(tool, str) else tool
        parsed = parse_input(definition, input if isinstance(input, str) else json.dumps(input))
        return asyncio.run(call_tool(definition, parsed, context))

    return run


@pytest.fixture(autouse=True)
def storage(tmp_path: Any) -> Iterator[Any]:
    with override_settings(MEDIA_ROOT=tmp_path, BASE_URL="https://agents.example"):
        yield tmp_path


def builtin(name: str) -> ToolDefinition:
    return ToolDefinition(**TOOLS[name].row())


def http_tool(url: str, **columns: Any) -> ToolDefinition:
    defaults: dict[str, Any] = {
        "name": "lookup",
        "display_name": "Look up",
        "description": "Looks something up.",
        "node_type": "http",
        "input_schema": {"type": "object"},
        "price": 2_000_000,
        "url": url,
    }
    return ToolDefinition(**{**defaults, **columns})
