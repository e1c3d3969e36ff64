"""Tools of an MCP server as rows of the catalogue: by the command and in the admin."""

import io
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from runs import catalogue
from runs.models import Tool
from tests import factories
from tests.http_server import serving
from tests.lifecycle import conftest as engine_fixtures
from tests.tools import test_mcp

pytestmark = pytest.mark.django_db
address = test_mcp.address
engines = engine_fixtures.engines
bench = engine_fixtures.bench
OF_THE_SERVER = {"add", "remote_name", "headers", "report", "fail", "slow", "with_progress", "large"}
PAGE = reverse("admin:runs_tool_import_tools")


def run_import(url: str, *options: str) -> str:
    out = io.StringIO()
    call_command("catalogue", "import-mcp", url, *options, stdout=out)
    return out.getvalue()


@pytest.fixture
def staff() -> Client:
    client = Client()
    client.force_login(factories.UserFactory(is_staff=True, is_superuser=True))
    return client


@pytest.fixture
def lister() -> Iterator[Any]:
    """A server whose list of tools is ``tools``. It records the headers that it gets."""

    class Handler(BaseHTTPRequestHandler):
        tools: list[dict[str, Any]] = []
        status = 200
        got: list[dict[str, str]] = []
        delay = 0.0

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.got.append({name.lower(): value for name, value in self.headers.items()})
            time.sleep(self.delay)
            results = {
                "initialize": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "lister", "version": "1"},
                },
                "tools/list": {"tools": self.tools},
            }
            result = results.get(asked["method"])
            answer = {"error": {"code": -32601, "message": "no"}} if result is None else {"result": result}
            body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), **answer}).encode()
            self.send_response(self.status if "id" in asked else 202)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_DELETE(self) -> None:
            self.send_error(405)

        do_GET = do_DELETE

        def log_message(self, *args: Any) -> None:
            pass

    Handler.got = []
    with serving(Handler) as url:
        Handler.url = f"{url}/mcp"  # type: ignore[attr-defined]
        yield Handler


def listed(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "inputSchema": {"type": "object"}} | more


def test_an_imported_tool_is_called_in_a_run(bench, address):
    said = run_import(address, "--price", "0.5")
    assert said.splitlines()[-1] == "11 added, 0 changed, 0 unchanged, 0 skipped."
    shown = {tool["name"]: tool for tool in bench.http.get("/tools").json()["items"]}
    assert shown.keys() >= OF_THE_SERVER
    assert (shown["add"]["description"], shown["add"]["nodeType"], shown["add"]["price"]) == (
        "Adds two numbers.",
        "mcp",
        0.5,
    )
    assert shown["add"]["inputSchema"]["required"] == ["a", "b"]
    run = bench.finish('/call add {"a": 40, "b": 2}\n/call remote_name {}\n/call add {"a": "x"}\n/say done')
    assert [(call["status"], call["result"]) for call in run["toolInvocations"]] == [
        ("COMPLETED", "42"),
        ("COMPLETED", "by its own name"),
        ("FAILED", None),
    ]
    assert run_import(address).splitlines()[-1] == "0 added, 0 changed, 11 unchanged, 0 skipped."


def test_a_second_import_brings_the_description_and_keeps_what_staff_decide(lister):
    lister.tools = [listed("search", title="Search"), listed("gone")]
    run_import(lister.url, "--header", "Authorization=Bearer sesame")
    assert {headers["authorization"] for headers in lister.got} == {"Bearer sesame"}
    Tool.objects.filter(name="search").update(price=7, approval="always", enabled=False, display_name="Ours")
    lister.tools = [listed("search", title="Search", description="Searches better."), listed("new")]
    lister.got.clear()
    assert run_import(lister.url).splitlines() == [
        "added: new",
        "changed: search",
        "New tools are enabled: all runs can call them, except of agents with tools of their own.",
        "1 added, 1 changed, 0 unchanged, 0 skipped.",
    ]
    assert not [headers for headers in lister.got if "authorization" in headers]
    row = Tool.objects.get(name="search")
    assert (row.description, row.display_name) == ("Searches better.", "Search")
    assert (row.price, row.approval, row.enabled) == (7, "always", False)
    assert json.loads(row.secret_headers) == {"Authorization": "Bearer sesame"}
    assert Tool.objects.filter(name="gone", enabled=True).exists()


def test_a_second_import_brings_a_schema_that_python_would_call_equal(lister):
    for value, said in ((1, "1 added, 0 changed"), (True, "0 added, 1 changed")):
        lister.tools = [listed("one", inputSchema={"type": "object", "properties": {"a": {"const": value}}})]
        assert said in run_import(lister.url)
        assert Tool.objects.get(name="one").input_schema["properties"]["a"]["const"] is value


def test_a_title_may_be_among_the_annotations(lister):
    lister.tools = [
        listed("old", annotations={"title": "Of 2025-03-26"}),
        listed("both", title="The newer", annotations={"title": "The older"}),
        listed("none", annotations={"readOnlyHint": True}),
    ]
    run_import(lister.url)
    titles = Tool.objects.filter(node_type="mcp").values_list("display_name", flat=True)
    assert {*titles} == {"Of 2025-03-26", "The newer", "none"}


def test_names_that_are_taken_are_skipped_and_a_prefix_helps(lister):
    lister.tools = [listed("calculate"), listed("model"), listed("x" * 64), listed("a.b"), listed("a/b")]
    said = run_import(lister.url)
    assert said.splitlines()[-1] == "2 added, 0 changed, 0 unchanged, 3 skipped."
    assert "skipped: calculate: The name calculate is taken. A prefix may help." in said
    assert Tool.objects.get(name="calculate").node_type == "builtin"
    said = run_import(lister.url, "--prefix", "git_")
    assert said.splitlines()[-1] == "3 added, 0 changed, 2 unchanged, 0 skipped."
    lister.tools = [listed("x" * 65)]
    assert f"skipped: {'x' * 65}: The name {'x' * 65} has more than 64 characters.\n" in run_import(lister.url)
    assert Tool.objects.get(name="git_calculate").remote_name == "calculate"
    assert Tool.objects.get(name="git_a_b").remote_name == "a/b"


@pytest.mark.parametrize(
    "bad",
    [
        {"name": ""},
        {"name": "x" * 201},
        {"name": "a\x00b"},
        {"inputSchema": {"type": "object", "properties": {"a": {"pattern": "("}}}},
        {"inputSchema": {"type": "object", "properties": {"a": {"$ref": "https://schemas.example/a.json"}}}},
        {"inputSchema": {"type": "object", "title": "a\x00b"}},
        {"inputSchema": {"type": "object", "allOf": json.loads("[" * 190 + "]" * 190)}},
    ],
)
def test_a_tool_that_cannot_be_stored_is_skipped_alone(lister, bad):
    lister.tools = [listed("good", description="a\x00b", title="x" * 200), listed("bad") | bad]
    said = run_import(lister.url)
    assert said.splitlines()[-1] == "1 added, 0 changed, 0 unchanged, 1 skipped."
    row = Tool.objects.get(name="good")
    assert (row.description, len(row.display_name)) == ("ab", 100)


def test_patterns_that_cannot_be_matched_are_left_to_the_server(lister):
    email = {"type": "string", "format": "email"}
    pattern = {"type": "string", "pattern": "^a(?:b)$"}

    def schema(**more: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"pattern": pattern, "to": {"type": "array", "items": email | more}}}

    lister.tools = [
        listed("ahead", inputSchema=schema(pattern=r"^(?!\.)(?!.*\.\.)[^@]+@[^@]+$")),
        listed("behind", inputSchema=schema(pattern=r"@(?<=a@)b")),
        listed("back", inputSchema=schema(pattern=r"^(a)\1$")),
    ]
    assert run_import(lister.url).splitlines()[-1] == "3 added, 0 changed, 0 unchanged, 0 skipped."
    assert [tool.input_schema for tool in Tool.objects.filter(node_type="mcp")] == [schema()] * 3
    assert run_import(lister.url).splitlines()[-1] == "0 added, 0 changed, 3 unchanged, 0 skipped."


def test_a_list_that_breaks_the_protocol_is_an_error_and_changes_nothing(lister):
    lister.tools = [listed("good"), listed("bad", inputSchema={"type": "array"})]
    with pytest.raises(CommandError, match="inputSchema"):
        run_import(lister.url)
    assert not Tool.objects.filter(node_type="mcp").exists()


def test_a_model_gets_no_details_of_a_list_that_breaks_the_protocol(lister, call):
    lister.tools = [listed("good"), listed("bad", inputSchema={"type": "array"})]
    error = test_mcp.failure(call, test_mcp.tool(lister.url, "good"), {})
    assert error.message == "good broke the MCP protocol."


def test_too_many_tools_are_refused(lister, monkeypatch):
    monkeypatch.setattr("runs.catalogue.imports.TOOL_IMPORT_MAX", 2)
    lister.tools = [listed(f"t{number}") for number in range(3)]
    with pytest.raises(CommandError, match="3 tools; the limit is 2"):
        run_import(lister.url)
    assert not Tool.objects.filter(node_type="mcp").exists()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/mcp", "connection was refused"),
        ("ftp://127.0.0.1/mcp", "http"),
        ("http://user:secret@127.0.0.1/mcp", "without credentials"),
    ],
)
def test_a_server_that_does_not_answer_is_an_error(url, reason, staff):
    with pytest.raises(CommandError, match=reason) as refused:
        run_import(url)
    assert "secret" not in str(refused.value)
    shown = staff.post(PAGE, {"url": url, "price": "0"})
    assert shown.status_code == 200
    assert reason in shown.content.decode()
    assert not Tool.objects.filter(node_type="mcp").exists()


def test_an_error_status_a_hanging_server_and_a_private_address_are_errors(lister, settings):
    lister.status = 503
    with pytest.raises(CommandError, match="HTTP status 503"):
        run_import(lister.url)
    lister.status, lister.delay = 200, 1.0
    settings.STAFF_REQUEST_SECONDS = 0.2
    with pytest.raises(CommandError, match=r"within 0\.2 seconds"):
        run_import(lister.url)
    settings.OUTBOUND_ALLOW_PRIVATE = False
    lister.got.clear()
    with pytest.raises(CommandError, match="not public"):
        run_import(lister.url)
    assert lister.got == []


def test_a_header_is_read_from_the_environment(lister, monkeypatch):
    lister.tools = [listed("search")]
    monkeypatch.setenv("THEIR_KEY", "sesame")
    run_import(lister.url, "--header", "X-Key=k-${THEIR_KEY}")
    assert {headers["x-key"] for headers in lister.got} == {"k-sesame"}
    for wrong, reason in (("X-Key=${NOBODYS_KEY}", "NOBODYS_KEY"), ("X-Key", "NAME=VALUE"), ("Host=a", "header")):
        with pytest.raises(CommandError, match=reason):
            run_import(lister.url, "--header", wrong)
    for price in ("-1", "x"):
        with pytest.raises(CommandError, match="price"):
            run_import(lister.url, "--price", price)


def test_staff_import_in_the_admin(lister, staff):
    lister.tools = [listed("search"), listed("calculate")]
    assert PAGE in staff.get(reverse("admin:runs_tool_changelist")).content.decode()
    assert staff.get(PAGE).status_code == 200
    catalogue.read()
    form = {"url": lister.url, "headers": '{"X-Key": "sesame"}', "names_begin_with": "", "price": "1.5"}
    shown = staff.post(PAGE, form).content.decode()
    assert "1 added, 0 changed, 0 unchanged, 1 skipped" in shown
    assert "sesame" not in shown
    assert not Tool.objects.get(name="search").enabled  # every run could call it at once
    Tool.objects.get(name="search").delete()
    staff.post(PAGE, form | {"enabled": "on"})
    tool = catalogue.read().tools["search"]
    assert (tool.price, tool.secret_headers) == (1_500_000, {"X-Key": "sesame"})
    row = Tool.objects.get(name="search")
    (entry,) = LogEntry.objects.filter(object_id=str(row.pk))
    assert entry.is_addition()
    for wrong in ({"price": "-1"}, {"headers": "sesame"}, {"names_begin_with": "a b"}, {"url": ""}):
        answer = staff.post(PAGE, form | wrong)
        assert answer.status_code == 200
        assert "sesame" not in answer.content.decode()


def test_only_staff_who_may_add_and_change_tools_import(client, lister):
    person = factories.UserFactory(is_staff=True)
    client.force_login(person)
    assert client.post(PAGE, {"url": lister.url, "price": "0"}).status_code == 403
    assert lister.got == []
