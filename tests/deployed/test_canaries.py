"""Logs, metrics, traces and error reports of a service that has all of them enabled.

Canaries are unique strings in users' content and in secrets. They may appear only where staff may read them. Every log
line names its request, run and task. One trace covers a whole run. One page holds the metrics of all processes.
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from runs.catalogue.seeds import ROLES
from tests.contract.routes import Operation, operations
from tests.deployed import crawl
from tests.deployed.outside import (
    CANARIES,
    FILE,
    FILE_NAME,
    MESSAGE,
    MODEL_ERROR,
    MODEL_OUTPUT,
    RECEIVER_ANSWER,
    TOOL_OUTPUT,
)
from tests.deployed.watched import CALLER, PASSWORD, TRACE, UNTOLD_TRACE, World, watched
from tests.driver import until
from tests.operations.conftest import MetricsPage

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(240)]

# The content of users, models, tools and receivers, and the pages where staff may read it (docs/admin.md). A user sees
# the same content of the own runs.
CONTENT = (MESSAGE, TOOL_OUTPUT, MODEL_OUTPUT, MODEL_ERROR, FILE, FILE_NAME)
ANSWERS, ANSWERED = (RECEIVER_ANSWER,), r"/webhooks/delivery/.+/change/"
PUBLIC = (
    *(
        "/",
        "/api/docs",
        "/api/schema",
        "/api/schema?format=json",
        "/api/schema/without-webhooks",
        "/docs/settings",
        "/playground",
    ),
    "/docs",
    *("/admin/login/", "/livez", "/readyz", "/metrics", "/nothing", "/api/nothing", "/files/a/b/c", "/uploads/x"),
)
SHOWN = (
    *("runs/run", "runs/turn", "runs/toolinvocation", "runs/waitpoint", "runs/tool"),
    *("runs/agentmodel", "chats/chat", "chats/attachment", "credits/account", "credits/ledgerentry"),
    *("webhooks/endpoint", "webhooks/delivery", "apikeys/apikey", "auth/user"),
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with watched() as world:
        yield world


def found(text: str, world: World) -> list[str]:
    return [canary for canary in (*CANARIES, *world.secrets) if canary in text]


def lines_of(world: World) -> list[tuple[str, str]]:
    logs = {name: process.log.read_text() for name, process in world.stack.processes.items()}
    return [(name, line) for name, text in logs.items() for line in text.splitlines()]


def test_the_canaries_are_in_the_stored_content(world: World) -> None:
    """The other tests of this file prove nothing without the canaries."""
    assert world.stack.session("ada").get(f"/chats/{world.run['chatId']}/messages").text.count(MESSAGE) == 4
    kept = world.stack.manage("shell", "-c", "from webhooks.models import *; print(Attempt.objects.count())")
    assert int(kept.split()[-1]) >= 2
    assert [answer.status_code for answer in world.errors] == [500, 400, 400, 400, 404, 404, 500, 401, 401]


# --- pages and answers: before the logs, which are checked afterwards ------------------------------------------------
def ids_of(world: World) -> dict[str, str]:
    return {
        "chatId": world.run["chatId"],
        "runId": world.run["id"],
        "waitpointId": world.asked["pendingWaitpoint"]["id"],
        "keyId": world.key_id,
        "attachmentId": world.attachment,
        "messageId": world.run["userMessageId"],
        "toolInvocationId": world.asked["toolInvocations"][0]["id"],
        "chatKey": world.run["chatId"],
        "threadId": world.run["chatId"],
        "agent": "default",
    }


def answers_to(world: World, user: str, *methods: str) -> Iterator[tuple[Operation, requests.Response]]:
    """The answers of both surfaces to the user, about the objects of ada."""
    clients = {"session": world.stack.session(user), "public": world.stack.public(user)}
    for operation in operations():
        if operation.method in methods:
            body = {"json": {"wrong": 1}} if operation.takes_body else {}
            path = "/" + operation.relative.format(userId=user, ledgerId="led_none", **ids_of(world))
            yield operation, clients[operation.surface].request(operation.method, path, **body)


def mcp_answers(world: World, user: str) -> str:
    """All results of the tools that only read, and of calls with wrong arguments."""
    calls: list[tuple[str, dict[str, Any]]] = [("list_chats", {}), ("get_credits", {}), ("get_run", {"wrong": 1})]
    calls += [("get_run", {"runId": world.run["id"]}), ("respond_to_waitpoint", {"waitpointId": "wp_none"})]
    bodies = [{"method": "tools/list", "params": {}}]
    bodies += [{"method": "tools/call", "params": {"name": name, "arguments": given}} for name, given in calls]
    url, texts = f"{world.stack.url}/api/mcp", []
    for body in bodies:
        answer = world.stack.public(user).post(url, json={"jsonrpc": "2.0", "id": 1, **body})
        assert answer.status_code == 200, answer.text
        texts.append(answer.text)
    return "\n".join(texts)


def test_no_answer_of_the_api_contains_a_secret(world: World) -> None:
    """A user sees what the own runs contain, and nothing else that was planted."""
    seen = ""
    for operation, answer in answers_to(world, "ada", "GET", "POST", "PATCH"):
        assert answer.status_code < 500, operation
        assert set(found(answer.text, world)) <= set(CONTENT), operation
        seen += answer.text
    for url in (world.stack.url, f"http://127.0.0.1:{world.stack.stream_port}"):
        stream = requests.get(f"{url}/api/public/v1/runs/{world.run['id']}/stream", headers=key_of(world), timeout=30)
        assert set(found(stream.text, world)) == {MESSAGE, TOOL_OUTPUT}
    assert set(found(mcp_answers(world, "ada"), world)) <= set(CONTENT)
    assert {MESSAGE, TOOL_OUTPUT, FILE_NAME} <= set(found(seen, world))


def key_of(world: World) -> dict[str, str]:
    return {"Authorization": f"Bearer {world.stack.api_key('ada')}"}


def test_another_user_sees_nothing(world: World) -> None:
    for operation, answer in answers_to(world, "bob", "GET", "POST", "PATCH"):
        assert found(answer.text, world) == [], operation
        if operation.parameters and operation.action != "of_chat":  # a report of movements, without any
            assert answer.status_code == (401 if operation.server_scope else 404), operation
    assert found(mcp_answers(world, "bob"), world) == []


@pytest.mark.parametrize("path", PUBLIC)
def test_public_pages_contain_no_canary(world: World, path: str) -> None:
    for url in (world.stack.url, f"http://127.0.0.1:{world.stack.stream_port}"):
        answer = requests.get(url + path, timeout=30)
        assert answer.status_code < 500
        assert (answer.status_code == 404) or path != "/playground"
        assert found(answer.text, world) == []


@pytest.mark.parametrize("person", ["boss", *ROLES])
def test_admin_pages_show_content_only_where_permitted(world: World, person: str) -> None:
    """The content page holds no secret either. Only superusers and the role support may open it. The boss, who may see
    everything, also follows the filters of lists.
    """
    kinds, reader = set(), person in ("boss", "support")
    session = crawl.sign_in(world.stack.url, person, PASSWORD)
    for path, answer in crawl.pages(session, world.stack.url, all_kinds=person == "boss"):
        kinds.add(crawl.kind_of(path))
        assert answer.status_code == 200, path
        allowed = CONTENT if path.endswith("/content/") and reader else ANSWERS if re.search(ANSWERED, path) else ()
        assert set(found(answer.text, world)) <= set(allowed), path
        if path == f"/admin/runs/run/{world.run['id']}/content/":
            assert {MESSAGE, TOOL_OUTPUT} <= set(found(answer.text, world))
    assert ("/admin/runs/run/*/content/" in kinds) == reader
    if person == "boss":
        assert kinds >= {f"/admin/{model}/*/change/" for model in SHOWN}


def test_no_log_line_contains_a_canary(world: World) -> None:
    guilty = [(name, found(line, world), line) for name, line in lines_of(world) if found(line, world)]
    assert guilty == []


def test_unexpected_exceptions_are_logged_with_type_and_place(world: World) -> None:
    """The line has the type and the place of the exception, in the web process and in the worker."""
    text = "\n".join(line for _, line in lines_of(world))
    for name, place in (("web", "in start_run"), ("runs-1", "in complete")):
        broken = [line for process, line in lines_of(world) if process == name and "exception" in line]
        assert any("django.db.utils." in line and place in line for line in broken), name
    assert "Traceback (most recent call last)" not in text


def test_every_log_line_is_json_and_names_its_request_run_and_task(world: World) -> None:
    logged = []
    for name, line in lines_of(world):
        try:
            logged.append(json.loads(line) | {"of": name})
        except ValueError:
            pytest.fail(f"{name} said what is no JSON: {line}")
    assert all(
        {"time", "level", "logger", "message", "request_id", "run_id", "task_id"} <= line.keys() for line in logged
    )
    broken = [line for line in logged if line["message"].endswith("failed for an unexpected reason")]
    assert {(line["of"], line["level"]) for line in broken} == {("runs-1", "ERROR")}
    assert all(line["run_id"].startswith("run_") for line in broken)
    by_request = {line["request_id"]: line for line in broken}
    assert by_request.keys() > {"untold"}
    # The worker's own sweep, which is not a task, or the sweep that beat starts found this run.
    assert re.fullmatch(r"wrk_\w+|[0-9a-f-]{36}", by_request.pop("untold")["task_id"])
    (line,) = by_request.values()
    assert len(line["request_id"]) == 32
    assert len(line["task_id"]) == 36


def test_log_lines_of_an_answered_waitpoint_name_its_run(world: World) -> None:
    lines = [json.loads(line) for name, line in lines_of(world) if name == "web" and "in respond" in line]
    assert [line["run_id"] for line in lines] == [world.asked["id"]]
    assert len(lines[0]["request_id"]) == 32


def test_the_broker_receives_only_ids(world: World) -> None:
    assert any("runs.execute_run" in command for command in world.commands), "nothing was overheard"
    assert [command for command in world.commands if found(command, world)] == []
    with world.broker.client() as client:
        used = [int(name.removeprefix("db")) for name in client.info("keyspace")]
    seen = 0
    for number in used:
        with world.broker.client(number) as client:
            for key in client.scan_iter(count=1000):
                kind = client.type(key).decode()
                read = {
                    "string": client.get,
                    "list": lambda key: client.lrange(key, 0, -1),
                    "hash": client.hgetall,
                    "set": client.smembers,
                    "zset": lambda key: client.zrange(key, 0, -1),
                }[kind]
                assert found(f"{key!r} {read(key)!r}", world) == [], key
                seen += 1
    assert seen > 5


def test_error_responses_contain_no_canary(world: World) -> None:
    for answer in world.errors:
        assert found(answer.text, world) == [], answer.text
        assert "Traceback" not in answer.text


def test_a_trace_links_the_request_to_the_model_and_tool_calls(world: World) -> None:
    spans = [span for span in world.outside.spans() if span["trace"] == TRACE]
    by_id = {span["id"]: span for span in spans}

    def ancestors(span: dict[str, str]) -> list[str]:
        parent = by_id.get(span["parent"])
        return [span["name"], *(ancestors(parent) if parent else [f"from {span['parent']}"])]

    request = ["POST api/v1/chats/<str:chatId>/runs", f"from {CALLER}"]
    run = ["run", "task runs.execute_run", *request]
    chains = [ancestors(span) for span in spans]
    assert ["model", *run] in chains
    assert ["tool", *run] in chains
    assert {span["service"] for span in spans} == {"agent-workflow-service"}
    assert {span["run.id"] for span in spans if span["name"] == "run"} == {world.run["id"]}
    assert {span["tool"] for span in spans if span["name"] == "tool"} == {"tool"}
    assert {span["request.id"] for span in spans if span["name"].startswith("POST")} == {"from-outside"}


def test_a_trace_continues_when_a_sweep_finds_the_run(world: World) -> None:
    spans = {span["name"]: span for span in world.outside.spans() if span["trace"] == UNTOLD_TRACE}
    assert spans.keys() >= {"asked", "run", "model"}
    assert spans["run"]["parent"] == spans["asked"]["id"]
    assert spans["model"]["parent"] == spans["run"]["id"]


def test_the_span_of_a_failed_run_has_the_code_of_its_reason(world: World) -> None:
    runs = world.stack.session("ada").get("/runs?limit=100").json()["items"]
    codes = {run["id"]: run["errorCode"] or "" for run in runs}
    assert {"", "MODEL_ERROR", "INTERNAL_ERROR"} <= set(codes.values())

    def errors() -> dict[str, str]:
        return {span["run.id"]: span["error"] for span in world.outside.spans() if span["name"] == "run"}

    until(lambda: codes.keys() <= errors().keys())
    assert errors() == codes


def test_no_span_contains_a_canary(world: World) -> None:
    bodies = world.outside.bodies("/v1/traces")
    assert bodies
    for body in bodies:
        assert found(body.decode("latin1"), world) == []
    # The span of a failure has the type of the error.
    assert "ModelError" in {span["error"] for span in world.outside.spans() if span["name"] == "model"}


def test_unexpected_exceptions_are_reported_without_content(world: World) -> None:
    reports = world.outside.reports()
    places = {
        frame["function"]
        for report in reports
        for error in report.get("exception", {}).get("values", [])
        for frame in error["stacktrace"]["frames"]
    }
    assert {"start_run", "complete"} <= places
    for report in reports:
        assert found(json.dumps(report), world) == []
    assert any(report["tags"]["run_id"].startswith("run_") for report in reports)


def test_metrics_of_all_processes_are_on_one_page(world: World) -> None:
    def shown() -> MetricsPage:
        answer = requests.get(f"{world.stack.url}/metrics", headers={"Authorization": "Bearer scraper"}, timeout=15)
        assert answer.status_code == 200
        return MetricsPage(answer.text)

    until(lambda: (shown()("webhook_attempts_total", outcome="5xx") or 0) >= 2)
    metrics = shown()
    # web · a run worker · the webhook worker · the maintenance worker · the stream process
    assert metrics("http_requests_total", method="POST", route="api/v1/chats/<str:chatId>/runs", status="201") == 8
    assert metrics("runs_finished_total", status="failed", error="INTERNAL_ERROR", reason="") == 2
    assert metrics("tool_calls_total", tool="tool", outcome="COMPLETED") == 1
    assert metrics("webhook_lag_seconds_count") >= 2
    assert metrics("housekeeping_last_success_timestamp_seconds", job="sweep-runs") > time.time() - 60
    assert metrics("http_request_seconds_count", route="api/v1/runs/<str:runId>/stream") >= 1
    assert metrics("run_workers") == 1
    assert found(metrics.text, world) == []


def test_a_process_sends_its_last_metrics_when_it_ends(world: World) -> None:
    stack = world.stack

    def answers() -> float:
        answer = requests.get(f"{stack.url}/metrics", headers={"Authorization": "Bearer scraper"}, timeout=15)
        return MetricsPage(answer.text)("http_requests_total", method="GET", route="api/v1/models", status="200") or 0

    stack.restart("web", environment={"config.settings.METRICS_FLUSH_SECONDS": "60"})
    before, session = answers(), stack.session("ada")
    for _ in range(7):
        assert session.get("/models").status_code == 200
    stack.restart("web")
    assert answers() == before + 7
