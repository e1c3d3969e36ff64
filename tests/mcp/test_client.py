"""Tests with the official MCP client against the running service, in each of its connection modes."""

import asyncio
import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import requests
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.driver import FINAL, Driver, until
from tests.mcp.rpc import TOOLS
from tests.stack.process import ROOT, python
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

MODES = ["auto", "legacy", "2026-07-28"]


def connected(stack: Stack, work: Callable[[Client], Awaitable[Any]], mode: Any = "auto", user: str = "ada") -> Any:
    """Return the result of ``work`` with a connected client."""

    async def main() -> Any:
        headers = {"Authorization": f"Bearer {stack.api_key(user)}"}
        async with httpx2.AsyncClient(headers=headers, timeout=70, trust_env=False) as http:
            transport = streamable_http_client(f"{stack.url}/api/mcp", http_client=http)
            async with Client(transport, mode=mode) as client:
                return await work(client)

    return asyncio.run(main())


async def call(client: Client, name: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result
    found: dict[str, Any] = result.structured_content  # type: ignore[assignment]
    return found


async def ended(client: Client, run: dict[str, Any]) -> dict[str, Any]:
    for _ in range(600):
        run = await call(client, "get_run", runId=run["id"])
        if run["status"] in FINAL:
            return run
        await asyncio.sleep(0.05)
    raise AssertionError(f"the run does not end: {run}")


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_conversation(stack: Stack, mode: str) -> None:
    async def work(client: Client) -> None:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == set(TOOLS)
        before = await call(client, "get_credits")
        chat = await call(client, "create_chat", title="By MCP")
        assert chat["id"] in [each["id"] for each in (await call(client, "list_chats"))["items"]]
        script = '/call calculate {"expression": "6*7"}\n/ask Which colour?\n/say {result}'
        run = await call(client, "start_run", chatId=chat["id"], message=script, waitSeconds=30)
        assert run["status"] == "waiting"
        assert run["toolInvocations"][0]["creditUsed"] == 0.1
        question = run["pendingWaitpoint"]
        assert question["requestPayload"]["question"] == "Which colour?"
        answer = {"waitpointId": question["id"], "kind": "CLARIFICATION", "answer": "blue"}
        assert (await call(client, "respond_to_waitpoint", **answer))["status"] == "COMPLETED"
        assert (await ended(client, run))["answer"] == "blue"
        assert (await call(client, "get_credits")) != before
        refused = await client.call_tool("get_run", {"runId": "run_1"})
        assert refused.is_error
        assert refused.structured_content["error"]["code"] == "NOT_FOUND"

    connected(stack, work, mode)


def test_wait_ends_at_its_limit_and_the_run_continues(stack: Stack) -> None:
    async def work(client: Client) -> None:
        chat = await call(client, "create_chat")
        run = await call(client, "start_run", chatId=chat["id"], message="/wait 600", waitSeconds=0.2)
        assert run["status"] in ("queued", "running")
        assert (await call(client, "cancel_run", runId=run["id"]))["cancelRequestedAt"]
        assert (await ended(client, run))["status"] == "cancelled"

    connected(stack, work)


def test_repeated_start_waits_for_what_is_still_to_come(stack: Stack) -> None:
    async def work(client: Client) -> None:
        chat = await call(client, "create_chat")
        given = {"chatId": chat["id"], "message": "/ask Which colour?\n/wait 2\n/say {result}", "waitSeconds": 30}
        run = await call(client, "start_run", **given, idempotencyKey="repeated")
        assert (await call(client, "start_run", **given, idempotencyKey="repeated"))["status"] == "waiting"
        answer = {"waitpointId": run["pendingWaitpoint"]["id"], "kind": "CLARIFICATION", "answer": "blue"}
        await call(client, "respond_to_waitpoint", **answer)
        run = await call(client, "start_run", **given, idempotencyKey="repeated")
        assert (run["status"], run["answer"]) == ("completed", "blue")

    connected(stack, work)


def post(stack: Stack, body: dict[str, Any], **options: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {stack.api_key('ada')}", "Accept": "application/json, text/event-stream"}
    http = requests.Session()
    http.trust_env = False
    return http.post(f"{stack.url}/api/mcp", json=body, headers=headers, **{"timeout": 60} | options)


def start(chat: str, message: str, wait: float) -> dict[str, Any]:
    # The progress token changes nothing: the answer is JSON.
    arguments = {"chatId": chat, "message": message, "waitSeconds": wait}
    params = {"name": "start_run", "arguments": arguments, "_meta": {"progressToken": "t"}}
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}


def test_the_answer_is_json(stack: Stack) -> None:
    answer = post(stack, start(Driver(stack.public("ada")).chat(), "Hello", 30))
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Request-Id"]
    assert answer.json()["result"]["structuredContent"]["status"] == "completed"


def test_run_continues_after_the_client_disconnects(stack: Stack) -> None:
    driver = Driver(stack.public("ada"))
    chat = driver.chat()
    with pytest.raises(requests.Timeout):
        post(stack, start(chat, "/stream 40 20\n/say over", 30), timeout=0.4)
    (run,) = driver.http.get(f"/chats/{chat}/runs").json()["items"]
    assert driver.wait(run["id"])["status"] == "completed"


def test_calls_that_wait_hold_no_thread(make_stack: Callable[..., Stack]) -> None:
    """And a look at the caller's credential, which is still valid, ends none of them."""
    short = {"runs.streams.hub.STREAM_AUTH_SECONDS": "0.05"}
    stack = make_stack(environment={"runs.mcp.views.MCP_WAITS_PER_USER": "5", "WEB_THREADS": "2"} | short)
    driver = Driver(stack.public("ada"))
    chats = [driver.chat() for _ in range(5)]

    def ask(chat: str) -> str:
        return str(post(stack, start(chat, "/wait 600", 60)).json()["result"]["structuredContent"]["status"])

    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(ask, chat) for chat in chats]
        until(lambda: len(driver.http.get("/runs?status=running").json()["items"]) == 5)
        for run in driver.http.get("/runs").json()["items"]:
            driver.cancel(run["id"])
        assert [each.result(60) for each in asked] == ["cancelled"] * 5


def test_example_program_of_the_documentation(stack: Stack) -> None:
    page = (ROOT / "docs" / "mcp.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = program.replace("http://127.0.0.1:8000", stack.url).replace("awk_…", stack.api_key("ada"))
    done = subprocess.run(python("-c", program), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Hello!")


def test_run_calls_the_endpoint_of_this_service_as_a_tool(stack: Stack) -> None:
    driver = Driver(stack.public("ada"))
    row = {
        "name": "credits_by_mcp",
        "remote_name": "get_credits",
        "display_name": "Credits",
        "description": "The user's credits.",
        "node_type": "mcp",
        "input_schema": {"type": "object"},
        "price": 0,
        "url": f"{stack.url}/api/mcp",
        "secret_headers": json.dumps({"Authorization": f"Bearer {stack.api_key('ada')}"}),
    }
    stack.manage("shell", "-c", f"from runs.models import Tool; Tool.objects.create(**{row!r})")
    until(lambda: row["name"] in [tool["name"] for tool in driver.http.get("/tools").json()["items"]])

    def called() -> dict[str, Any] | None:
        """Start a run, and return it if it called the tool. A worker can load a new tool later than the web process."""
        run = driver.finish("/call credits_by_mcp {}\n/say {result}")
        return None if run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL" else run

    run = until(called)
    (call,) = run["toolInvocations"]
    assert (call["status"], call["nodeType"]) == ("COMPLETED", "mcp")
    assert set(json.loads(driver.content(run))) == {"balance", "held", "available", "expiring"}
