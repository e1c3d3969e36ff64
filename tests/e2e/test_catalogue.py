"""Runs use tools and models that staff created in the admin, with real workers and real servers behind them."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.driver import Driver
from tests.stack.plugin import given_services
from tests.stack.process import Process, free_port, python, wait_for
from tests.stack.stack import Stack
from tests.webhooks import receiver as behaviours
from tests.webhooks.receiver import answer, receiving

pytestmark = pytest.mark.stack

PASSWORD = "correct horse battery"
MAKE_STAFF = f"""
from django.contrib.auth.models import User
User.objects.create_superuser("root", "root@example.com", "{PASSWORD}")
"""
SECRET = "Bearer the-tools-own-secret"
CREDENTIALS = """
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("SELECT secret_headers FROM runs_tool WHERE secret_headers IS NOT NULL")
    print(cursor.fetchall())
"""


class Form(HTMLParser):
    """The fields that a browser would submit for the unchanged form with the id ``name``."""

    def __init__(self, page: str, name: str) -> None:
        super().__init__()
        self.name, self.inside = name, False
        self.values: dict[str, str] = {}
        self.area = self.select = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        name, value = given.get("name") or "", given.get("value") or ""
        if tag == "form":
            self.inside = given.get("id") == self.name
        elif not self.inside:
            return
        elif tag == "input" and name and given.get("type") not in ("submit", "button"):
            if given.get("type") != "checkbox" or "checked" in given:
                self.values[name] = value or ("on" if given.get("type") == "checkbox" else "")
        elif tag == "textarea":
            self.area, self.values[name] = name, ""
        elif tag == "select":
            self.select, self.values[name] = name, ""
        elif tag == "option" and "selected" in given:
            self.values[self.select] = value

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self.area = ""

    def handle_data(self, data: str) -> None:
        if self.area:
            self.values[self.area] = (
                data.lstrip("\r\n") if not self.values[self.area] else self.values[self.area] + data
            )


class Staff:
    """A staff user who is signed in to the admin."""

    def __init__(self, stack: Stack) -> None:
        self.base = f"{stack.url}/admin"
        self.http = requests.Session()
        self.http.trust_env = False
        self.send("/login/?next=/admin/", "login-form", username="root", password=PASSWORD)

    def send(self, path: str, form: str, **fields: str) -> requests.Response:
        page = self.http.get(self.base + path, timeout=30)
        values = {**Form(page.text, form).values, **fields}
        assert "csrfmiddlewaretoken" in values, page.text[:2000]
        sent = self.http.post(self.base + path, values, headers={"Referer": self.base + path}, timeout=30)
        assert sent.status_code == 200, sent.text
        assert "errorlist" not in sent.text, sent.text
        return sent

    def choice(self, path: str, label: str) -> str:
        """The value of an option of a form."""
        found = re.search(rf'<option value="(\d+)"[^>]*>\s*{label}\b', self.http.get(self.base + path, timeout=30).text)
        assert found
        return found[1]

    def add_tool(self, name: str, node_type: str, url: str, **fields: str) -> None:
        values = {
            "name": name,
            "display_name": name,
            "description": f"The tool {name}.",
            "node_type": node_type,
            "input_schema": '{"type": "object"}',
            "price": "2",
            "approval": "never",
            "url": url,
        }
        self.send("/runs/tool/add/", "tool_form", **values | fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with an OpenAI-compatible API."""
    yield from served(tmp_path_factory, "tests.llm.model_server", "--port")


@pytest.fixture(scope="module")
def mcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MCP server built with the official SDK."""
    for address in served(tmp_path_factory, "tests.tools.mcp_server"):
        yield f"{address}/mcp"


def served(folders: pytest.TempPathFactory, module: str, *options: str) -> Iterator[str]:
    port = free_port()
    log: Path = folders.mktemp("server") / "log"
    process = Process(module, python("-m", module, *options, str(port)), log=log)
    process.start()
    try:
        wait_for(lambda: process.check() or accepts(port), 30, f"the start of {module}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def stack(model: str) -> Iterator[Stack]:
    settings = {"OPENAI_BASE_URL": model, "OPENAI_API_KEY": "sk-test"}
    with Stack(**given_services(), environment=settings) as running:
        running.manage("shell", "--no-imports", "-c", MAKE_STAFF)
        yield running


@pytest.fixture(scope="module")
def staff(stack: Stack) -> Staff:
    return Staff(stack)


@pytest.fixture
def called(stack: Stack) -> Callable[..., tuple[dict[str, Any], str]]:
    """``called(tool, input)`` starts a run that calls the tool. It returns the invocation and the run's final text."""
    driver = Driver(stack.session("ada"))

    def call(tool: str, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
        # A process reads a new tool within seconds.
        offered = lambda: tool in [each["name"] for each in driver.http.get("/tools").json()["items"]]  # noqa: E731
        stack.wait_for(offered, 20, "the new tool on offer")

        def used() -> dict[str, Any] | None:
            run = driver.finish(f"/call {tool} {json.dumps(given)}\n/say {{result}}")
            return None if run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL" else run

        run = stack.wait_for(used, 20, "the new tool's use")
        assert run is not None
        assert run["status"] == "completed"
        (invocation,) = run["toolInvocations"]
        return invocation, driver.content(run)

    return call


def test_a_run_calls_an_http_tool(stack: Stack, staff: Staff, called: Any) -> None:
    with receiving(
        answer(200, b'{"result": "sunny", "creditUsed": 1.5, "resultUrls": ["https://a.example/b"]}')
    ) as server:
        secret = json.dumps({"Authorization": SECRET})
        staff.add_tool("weather", "http", server.url, new_secret_headers=secret)
        invocation, said = called("weather", {"city": "Oslo"})
        assert (invocation["status"], invocation["nodeType"], said) == (
            "COMPLETED",
            "http",
            "sunny\nhttps://a.example/b",
        )
        assert (invocation["creditUsed"], invocation["resultUrls"]) == (1.5, ["https://a.example/b"])
        request = server.requests[-1]
        body = json.loads(request.body)
        assert (body["invocationId"], body["input"]) == (invocation["id"], {"city": "Oslo"})
        assert request.header("Idempotency-Key") == invocation["id"]
        assert request.header("Authorization") == SECRET
    stored = stack.manage("shell", "--no-imports", "-c", CREDENTIALS)
    assert "gAAAA" in stored
    assert SECRET not in stored
    pages = [staff.http.get(f"{staff.base}/runs/tool/{path}", timeout=30).text for path in ("", "?q=weather")]
    assert not [page for page in pages if SECRET in page]
    assert not [name for name in stack.processes if SECRET in stack.logs(name, 100_000)]


def test_the_time_limit_of_a_tool_holds_in_a_run(staff: Staff, called: Any) -> None:
    with receiving(behaviours.hang) as server:
        staff.add_tool("hangs", "http", server.url, timeout_seconds="0.8")
        invocation, _ = called("hangs", {})
        assert (invocation["status"], invocation["errorCode"], invocation["creditUsed"]) == (
            "FAILED",
            "TOOL_TIMEOUT",
            0,
        )


def test_a_run_calls_an_mcp_tool(staff: Staff, called: Any, mcp: str) -> None:
    schema = (
        '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}'
    )
    staff.add_tool("plus", "mcp", mcp, remote_name="add", input_schema=schema)
    invocation, said = called("plus", {"a": 40, "b": 2})
    assert (invocation["status"], invocation["nodeType"], invocation["creditUsed"], said) == (
        "COMPLETED",
        "mcp",
        2,
        "42",
    )
    invocation, _ = called("plus", {"a": "forty"})
    assert (invocation["status"], invocation["errorCode"]) == ("FAILED", "INVALID_INPUT")


def test_a_failed_call_of_an_mcp_tool_is_free(staff: Staff, called: Any, mcp: str) -> None:
    staff.add_tool("mcp_fails", "mcp", mcp, remote_name="fail")
    invocation, _ = called("mcp_fails", {"reason": "no"})
    assert (invocation["status"], invocation["errorCode"], invocation["creditUsed"]) == ("FAILED", "TOOL_ERROR", 0)


def test_a_run_uses_a_new_model(stack: Stack, staff: Staff) -> None:
    staff.send(
        "/runs/agentmodel/add/",
        "agentmodel_form",
        name="offered",
        display_name="Offered",
        provider=staff.choice("/runs/agentmodel/add/", "openai"),
        provider_model="text=Made by staff",
        price_in="1000",
        price_out="2000",
        enabled="on",
    )
    driver = Driver(stack.session("ada"))
    offered = lambda: "offered" in [model["name"] for model in driver.http.get("/models").json()["items"]]  # noqa: E731
    stack.wait_for(offered, 20, "the new model on offer")
    # The most that the turn can cost is held: a price of 2 credits for each token of a long answer.
    stack.manage("grant_credits", "ada", "100000", "--reason", "a test")
    run = stack.wait_for(lambda: finished(driver), 20, "a run with the new model")
    assert (run["status"], run["resolvedModel"]) == ("completed", "offered")
    assert driver.content(run) == "Made by staff"
    # 21 input tokens, 13 output tokens.
    assert run["totalCreditsUsed"] == 21 + 26


def finished(driver: Driver) -> dict[str, Any] | None:
    """A run with the new model. None while the workers have not read it yet."""
    run = driver.finish("Hello", model="offered")
    return run if run["status"] == "completed" else None
