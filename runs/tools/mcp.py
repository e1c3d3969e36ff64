"""Tools that staff add, each a tool of an MCP server (streamable HTTP): ``url`` is the server's address.

The protocol is the official SDK's; ``mcp_client`` holds what needs it. It is loaded with the first call, as it takes
memory and a second or two, and runs on an event loop of its own: whatever it does, the engine's loop goes on.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from django.utils.module_loading import import_string

from runs.tools.base import ToolContext, ToolDefinition, ToolResult, in_thread

T = TypeVar("T")
CLIENT = "runs.tools.mcp_client.call"


class Loop:
    """One event loop on one thread a process, started by the first call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.pid = 0

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self.lock:
            if self.loop is None or self.pid != os.getpid():  # a fork takes the loop along, but not the thread
                self.loop, self.pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self.loop.run_forever, name="mcp-tools", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self.loop)


_loop = Loop()


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Calls the server's tool. Whatever goes wrong there, and a result that says ``isError``, is ``TOOL_ERROR``."""
    call = await in_thread(context, import_string, CLIENT)
    result: ToolResult = await asyncio.wrap_future(_loop.submit(call(definition, input, context)))
    return result
