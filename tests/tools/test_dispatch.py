"""Tests of ``call_tool``. The engine gets a limited result, a ToolFailure or its own cancellation."""

import asyncio
import dataclasses
import pickle
import threading

import pytest
from django.test import override_settings

from runs.tools import dispatch
from runs.tools.base import ToolFailure, ToolResult
from runs.tools.dispatch import call_tool
from tests.tools.conftest import builtin, http_tool


@pytest.fixture
def tool(monkeypatch):
    """Replace the implementation of HTTP tools by a coroutine, and return the definition of such a tool."""

    def install(execute, **columns):
        monkeypatch.setitem(dispatch.TYPES, "http", dispatch.ToolType("", execute, needs_url=True))
        return http_tool("https://example.com", **columns)

    return install


def failure(definition, context, input=None):
    with pytest.raises(ToolFailure) as caught:
        asyncio.run(call_tool(definition, input or {}, context))
    return caught.value


@pytest.mark.parametrize(
    "error",
    [ValueError("secret"), OSError("secret"), TimeoutError("secret"), RecursionError("secret"), MemoryError("secret")],
)
def test_exception_becomes_a_tool_error_without_its_text(tool, context, error):
    async def execute(definition, input, context):
        raise error

    caught = failure(tool(execute), context)
    assert caught.code == "TOOL_ERROR"
    assert "secret" not in caught.message


def test_tool_failure_is_passed_on_cleaned_and_shortened(tool, context):
    async def execute(definition, input, context):
        raise ToolFailure("TOOL_ERROR", "no\x00\ud800" + "x" * 5000)

    caught = failure(tool(execute), context)
    assert caught.message.startswith("no\ufffdxxx")
    assert len(caught.message) == 1000


@pytest.mark.parametrize(("own", "left"), [(0.05, 20.0), (20.0, 0.05), (None, 0.05)])
def test_shorter_time_limit_of_tool_and_run_applies(tool, context, own, left):
    async def execute(definition, input, context):
        await asyncio.Event().wait()

    caught = failure(tool(execute, timeout_seconds=own), dataclasses.replace(context, timeout_seconds=left))
    assert caught.code == "TOOL_TIMEOUT"
    assert "0.05 seconds" in caught.message


def test_tool_without_a_time_limit_uses_the_setting(tool, context):
    async def execute(definition, input, context):
        return ToolResult(str(context.timeout_seconds))

    definition = tool(execute)
    with override_settings(TOOL_TIMEOUT_SECONDS=7.5):
        assert asyncio.run(call_tool(definition, {}, context)).text == "7.5"


def test_call_without_remaining_time_is_a_timeout(tool, context):
    async def execute(definition, input, context):
        await asyncio.sleep(0)
        return ToolResult("late")

    assert failure(tool(execute), dataclasses.replace(context, timeout_seconds=-1.0)).code == "TOOL_TIMEOUT"


def test_cancellation_is_propagated(tool, context):
    async def scenario():
        entered = asyncio.Event()

        async def execute(definition, input, context):
            entered.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(call_tool(tool(execute), {}, context))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_cancelled_call_does_not_wait_for_its_thread(server, context):
    server.hold = True

    async def scenario():
        task = asyncio.create_task(call_tool(http_tool(server.url), {}, context))
        assert await asyncio.to_thread(server.arrived.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server.release.is_set()
        server.release.set()

    asyncio.run(scenario())


def test_tools_run_concurrently(context):
    """Each tool waits for the other, so the test can end only if they run concurrently."""
    barrier = threading.Barrier(2, timeout=20)

    async def scenario():
        await asyncio.gather(*[context.threads.run(1, barrier.wait) for _ in range(2)])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("node_type", "name", "code"),
    [("unheard-of", "x", "UNKNOWN_TOOL"), ("builtin", "x", "UNKNOWN_TOOL"), ("builtin", "ask_user", "UNKNOWN_TOOL")],
)
def test_tool_that_cannot_be_called_is_unknown(context, node_type, name, code):
    assert failure(http_tool("", name=name, node_type=node_type), context).code == code


def test_definitions_results_and_failures_can_be_pickled():
    for value in (builtin("calculate"), ToolResult("a", ("https://example.com",), 1)):
        assert pickle.loads(pickle.dumps(value)) == value
    copy = pickle.loads(pickle.dumps(ToolFailure("TOOL_ERROR", "why")))
    assert (copy.code, copy.message) == ("TOOL_ERROR", "why")
