"""Client tools: calls that the caller's app executes."""

from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils.dateparse import parse_datetime

from config.kernel import clock
from runs import catalogue, lifecycle
from runs.models import Run, Tool, ToolInvocation
from tests.driver import InProcess, until
from tests.factories import UserFactory, public_client, session_client
from tests.lifecycle import conftest as engine_fixtures

engines = engine_fixtures.engines
bench = engine_fixtures.bench
events = engine_fixtures.events

SCHEMA = {"type": "object", "properties": {"zoom": {"type": "integer"}}, "required": ["zoom"]}
MAP = {"name": "show_map", "description": "Shows the map.", "inputSchema": SCHEMA}
SCRIPT = '/call show_map {"zoom": 3}\n/say It is {result}.'


def ask(bench, message=SCRIPT, tools=(MAP,)):
    """A run that is parked, with its last call."""
    run = bench.start(message, clientTools=list(tools))
    until(lambda: Run.objects.filter(pk=run["id"], parked=True).exists(), describe=lambda: bench.get(run["id"]))
    run = bench.get(run["id"])
    return run, run["toolInvocations"][-1]


def submit(client, call, body):
    return client.post(f"/tool-invocations/{call['id']}/result", body)


def test_the_app_executes_a_call_and_submits_its_result(bench, events):
    run, call = ask(bench)
    assert (run["status"], run["awaiting"]) == ("running", "client")
    assert (call["nodeType"], call["status"], call["awaiting"]) == ("client", "DISPATCHING", "client")
    assert (call["input"], call["creditEstimate"]) == ({"zoom": 3}, 0)
    assert parse_datetime(call["expiresAt"]) - parse_datetime(call["startedAt"]) == timedelta(hours=24)
    assert bench.http.get(f"/tool-invocations/{call['id']}").json() == call
    happened = [(kind, data) for kind, data in events(run["id"]) if kind.startswith("tool.")]
    assert [(kind, data["awaiting"]) for kind, data in happened] == [
        ("tool.started", "client"),
        ("tool.parked", "client"),
    ]
    assert bench.http.get("/runs?awaiting=client").json()["items"][0]["awaiting"] == "client"
    answer = submit(bench.http, call, {"result": {"seen": True, "at": 1.50}})
    assert answer.status_code == 200
    ended = answer.json()
    assert (ended["status"], ended["result"], ended["awaiting"]) == ("COMPLETED", '{"seen":true,"at":1.5}', None)
    assert submit(bench.http, call, {"error": "too late"}).json()["result"] == ended["result"]
    run = bench.wait(run["id"])
    assert run["answer"] == 'It is {"seen":true,"at":1.5}.'
    assert run["toolInvocations"][0]["creditUsed"] == 0
    assert list(lifecycle.violations()) == []


def test_an_error_of_the_app_is_told_to_the_model(bench):
    run, call = ask(bench)
    assert submit(bench.http, call, {"error": "The user closed the map."}).json()["errorCode"] == "TOOL_ERROR"
    assert bench.wait(run["id"])["answer"] == "It is TOOL_ERROR: The user closed the map.."


def test_an_input_that_does_not_fit_reaches_no_app(bench):
    run = bench.start('/call show_map {"zoom": "x"}\n/say {result}', clientTools=[MAP])
    assert bench.wait(run["id"])["toolInvocations"][0]["errorCode"] == "INVALID_INPUT"


def test_without_a_result_the_run_goes_on_after_the_time(bench):
    run, _ = ask(bench)
    ToolInvocation.objects.update(expires_at=clock.now())
    assert bench.wait(run["id"])["answer"] == "It is TOOL_TIMEOUT: The app gave no outcome in time.."


def test_a_takeover_knows_the_tools_of_the_request(bench, engines):
    run, call = ask(bench, SCRIPT + '\n/call show_map {"zoom": 4}\n/say {result}')
    engine_fixtures.vanish(bench.engine)
    submit(bench.http, call, {"result": 1})
    engines()
    until(lambda: ToolInvocation.objects.filter(awaiting="client", call_index=1, turn_index=2).exists())
    submit(bench.http, bench.get(run["id"])["toolInvocations"][-1], {"result": 2})
    assert bench.wait(run["id"])["status"] == "completed"


def test_a_client_tool_of_the_catalogue(bench):
    Tool.objects.create(
        name="locate", display_name="Locate", description="Where the user is.", node_type="client", price=0
    )
    catalogue.forget()
    catalogue.refresh()
    run, call = ask(bench, "/call locate {}\n/say {result}", ())
    assert (call["nodeType"], call["awaiting"]) == ("client", "client")
    submit(bench.http, call, {"result": "Ulm"})
    assert bench.wait(run["id"])["answer"] == "Ulm"


@pytest.mark.parametrize(
    "body", [{}, {"result": 1, "error": "x"}, {"error": ""}, {"error": "x" * 1001}, {"error": 5}, {"other": 1}, []]
)
def test_a_body_that_does_not_fit_leaves_the_call_open(bench, body):
    run, call = ask(bench)
    assert submit(bench.http, call, body).status_code == 400
    assert bench.get(run["id"])["awaiting"] == "client"


def test_whose_call_it_is_and_which_scope_it_needs(bench, user):
    run, call = ask(bench)
    other = InProcess(session_client(UserFactory()))
    assert submit(other, call, {"result": 1}).status_code == 404
    assert other.get(f"/tool-invocations/{call['id']}").status_code == 404
    reads = InProcess(public_client(user, ["runs:read"]), "/api/public/v1")
    assert reads.get(f"/tool-invocations/{call['id']}").json() == call
    assert submit(reads, call, {"result": 1}).json()["error"]["details"] == {"requiredScope": "runs:write"}
    writes = InProcess(public_client(user, ["runs:write"]), "/api/public/v1")
    assert writes.get(f"/tool-invocations/{call['id']}").status_code == 403
    ended = submit(writes, call, {"result": "secret"}).json()
    assert (ended["status"], ended["input"], ended["result"]) == ("COMPLETED", {}, None)
    assert bench.wait(run["id"])["toolInvocations"][0]["result"] == "secret"


def test_a_run_that_awaits_both_says_client_as_long_as_it_awaits_the_app(bench):
    show = '/call show_map {"zoom": 3}\n'
    run, _ = ask(bench, '/call long_job {"seconds": 600}\n' + 2 * show + "/say {result}")
    job, *shown = bench.get(run["id"])["toolInvocations"]
    assert [call["awaiting"] for call in (run, job, *shown)] == ["client", "tool", "client", "client"]
    for call, left in zip(shown, ("client", "tool"), strict=True):
        submit(bench.http, call, {"result": 1})
        assert bench.get(run["id"])["awaiting"] == left


def test_a_call_that_awaits_its_tool_is_a_conflict(bench):
    run = bench.start('/call long_job {"seconds": 600}\n/say {result}')
    until(lambda: Run.objects.filter(parked=True).exists())
    (call,) = bench.get(run["id"])["toolInvocations"]
    answer = submit(bench.http, call, {"result": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "CONFLICT")
    call_command("callback", call["id"], "--result", "done")
    assert bench.wait(run["id"])["answer"] == "done"
    with pytest.raises(CommandError, match="COMPLETED"):
        call_command("callback", call["id"], "--result", "again")
    with pytest.raises(CommandError, match="no tool call"):
        call_command("callback", "inv_x", "--result", "again")


def test_a_long_job_ends_in_time_on_a_machine_whose_clock_is_wrong(bench, monkeypatch):
    run = bench.start('/call long_job {"seconds": 1}\n/say {result}')
    until(lambda: ToolInvocation.objects.filter(run=run["id"], awaiting="tool").exists())
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert bench.wait(run["id"])["answer"] == "The job took 1 seconds."


def test_a_long_job_tells_its_progress_and_ends(bench, events):
    run = bench.finish('/call long_job {"seconds": 0.4}\n/say {result}')
    assert run["answer"] == "The job took 0.4 seconds."
    (call,) = run["toolInvocations"]
    assert (call["status"], call["creditUsed"]) == ("COMPLETED", 2)
    assert "tool.progress" in [kind for kind, _ in events(run["id"])]


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([MAP] * 33, "clientTools"),
        ([MAP, MAP], "clientTools.1.name"),
        ([MAP | {"name": "calculate"}], "clientTools.0.name"),
        ([MAP | {"name": "model"}], "clientTools.0.name"),
        ([MAP | {"name": "submit_output"}], "clientTools.0.name"),
        ([MAP | {"name": "x" * 65}], "clientTools.0.name"),
        ([MAP | {"name": "a b"}], "clientTools.0.name"),
        ([MAP | {"name": "map\n"}], "clientTools.0.name"),
        ([MAP | {"description": "x" * 2001}], "clientTools.0.description"),
        ([MAP | {"inputSchema": {"type": "array"}}], "clientTools.0.inputSchema"),
        ([MAP | {"inputSchema": {"properties": 5}}], "clientTools.0.inputSchema"),
        ([MAP | {"inputSchema": {"description": "x" * 16 * 1024}}], "clientTools.0.inputSchema"),
        ([MAP | {"inputSchema": []}], "clientTools.0.inputSchema"),
        ([MAP | {"url": "https://example.com"}], "clientTools.0.url"),
        ([{"name": "x"}], "clientTools.0.description"),
        (MAP, "clientTools"),
        ([5], "clientTools.0"),
    ],
)
@pytest.mark.django_db
def test_client_tools_of_a_request_have_strict_limits(session, tools, field):
    chat = session.post("/api/v1/chats", {}, format="json").json()["id"]
    body = {"message": "Hello", "clientTools": tools}
    answer = session.post(f"/api/v1/chats/{chat}/runs", body, format="json")
    assert answer.status_code == 400
    fields = answer.json()["error"]["details"]["fields"]
    assert any(name == field or name.startswith(f"{field}.") for name in fields), fields


@pytest.mark.django_db
def test_no_schema_after_a_wrong_one_is_checked(session):
    chat = session.post("/api/v1/chats", {}, format="json").json()["id"]
    tools = [MAP | {"name": name, "inputSchema": {"properties": 5}} for name in ("first", "second")]
    body = {"message": "Hello", "clientTools": tools}
    answer = session.post(f"/api/v1/chats/{chat}/runs", body, format="json")
    assert list(answer.json()["error"]["details"]["fields"]) == ["clientTools.0.inputSchema"]
