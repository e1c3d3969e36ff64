"""No code on an event loop reaches the database: with every cache outdated, runs, tools, webhooks and streams work."""

import asyncio
import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from config.api.session_tokens import mint
from config.kernel import clock
from config.serve.front import Front
from runs import catalogue
from runs.models import AgentModel, Provider, Tool
from runs.streams.hub import Hub
from tests import factories
from tests.driver import until
from tests.stack.process import Process, free_port, python, wait_for
from tests.streams.test_hub import end
from tests.tools.test_mcp import accepts
from tests.webhooks.conftest import deliver
from tests.webhooks.receiver import answer, receiving
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = "\n".join(
    [
        "/say One moment.",
        '/call calculate {"expression": "6*7"}',
        "/call look_up {}",
        '/call add {"a": 1, "b": 2}',
        "/stream 10 20",
        "/ask Which?",
        "/say {result} it is",
    ]
)
MODEL = 'call=calculate&args={"expression": "1%2B1"}&chunks=10&ms=5'


@pytest.fixture
def reached(monkeypatch) -> list[str]:
    """The places on an event loop that asked for the database, whether or not the error was caught."""
    found: list[str] = []

    def watch(name: str) -> None:
        original = getattr(BaseDatabaseWrapper, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                found.append("".join(traceback.format_stack(limit=8)))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(BaseDatabaseWrapper, name, watched)

    for name in ("cursor", "connect", "ensure_connection", "commit", "rollback", "savepoint"):
        watch(name)
    return found


@pytest.fixture
def servers(tmp_path: Path, settings) -> Iterator[str]:
    """A model provider and an MCP server. Returns the address of the latter."""
    settings.OPENAI_API_KEY, ports = "sk-test", [free_port(), free_port()]
    settings.OPENAI_BASE_URL = f"http://127.0.0.1:{ports[0]}/v1"
    commands = [["tests.llm.model_server", "--port", str(ports[0])], ["tests.tools.mcp_server", str(ports[1])]]
    started = [Process(name, python("-m", name, *rest), log=tmp_path / name) for name, *rest in commands]
    try:
        for process in started:
            process.start()
        for process, port in zip(started, ports, strict=True):
            wait_for(lambda process=process, port=port: process.check() or accepts(port), 30, process.name)
        yield f"http://127.0.0.1:{ports[1]}/mcp"
    finally:
        for process in started:
            process.kill()


@pytest.fixture
def outdated(monkeypatch) -> None:
    """Every cache is outdated whenever it is asked."""
    monkeypatch.setattr("config.kernel.clock.DATABASE_CLOCK_SECONDS", 0)
    monkeypatch.setattr(clock, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(catalogue, "MAX_AGE_SECONDS", 0.0)
    clock.sync()


async def streamed(run_id: str, token: str) -> str:
    """The run's stream as the web server sends it."""
    loop = asyncio.get_running_loop()
    front, Hub.of_process = Front(get_wsgi_application()), None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://127.0.0.1") as http:
        headers = {"Authorization": f"Bearer {token}"}
        answered = await http.get(f"/api/v1/runs/{run_id}/stream", headers=headers)
        assert (await http.get("/livez")).status_code == 200
    hub: Hub | None = Hub.of_process
    assert hub is not None
    for threads in (hub.threads, front.threads):
        await loop.run_in_executor(threads, connections.close_all)
    await end(hub)
    Hub.of_process = None
    return answered.text


def test_no_event_loop_reaches_the_database(outdated, servers, reached, bench, user) -> None:
    with receiving(answer(200, b'{"result": "ok"}')) as receiver:
        factories.EndpointFactory(user=user, url=receiver.url)
        common = {"approval": "never", "price": 1000, "input_schema": {"type": "object"}}
        Tool.objects.create(name="look_up", display_name="x", node_type="http", url=receiver.url, **common)
        Tool.objects.create(name="add", display_name="x", node_type="mcp", url=servers, **common)
        AgentModel.objects.create(
            name="real",
            display_name="x",
            provider=Provider.objects.get(name="openai"),
            provider_model=MODEL,
            price_in=1,
            price_out=1,
        )
        until(lambda: {"look_up", "add"} <= set(catalogue.remembered().tools))
        run, other = bench.start(SCRIPT), bench.start("Hello", model="real")
        run = bench.wait(run["id"], "waiting")
        bench.respond(run, kind="CLARIFICATION", answer="blue")
        run, other = bench.wait(run["id"]), bench.wait(other["id"])
        assert (run["status"], other["status"]) == ("completed", "completed")
        calls = [*run["toolInvocations"], *other["toolInvocations"]]
        assert {(call["name"], call["status"]) for call in calls} == {
            (name, "COMPLETED") for name in ("calculate", "look_up", "add", "ask_user")
        }
        events = asyncio.run(streamed(run["id"], mint(user.get_username())))
        assert "event: run.status" in events
        deliver()
        assert not Delivery.objects.exclude(status="DELIVERED").exists()
        sent = [json.loads(request.body) for request in receiver.requests if b'"type"' in request.body]
        assert {body["type"] for body in sent} >= {"agent.started", "agent.completed", "tool.completed"}
    assert reached == []
