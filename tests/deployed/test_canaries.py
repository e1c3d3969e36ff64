"""Logs, metrics, traces and error reports of a service that has all of them enabled.

Canaries are unique strings in users' content and in secrets. They may appear only where staff may read them. Every log
line names its request, run and task. One trace covers a whole run. One page holds the metrics of all processes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest
import requests

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

# The content of users, models, tools and receivers, and the pages where staff may read it (docs/admin.md).
CONTENT = (MESSAGE, TOOL_OUTPUT, MODEL_OUTPUT, MODEL_ERROR, FILE, FILE_NAME)
ANSWERS, ANSWERED = (RECEIVER_ANSWER,), r"/webhooks/(attempt|delivery)/.+/change/"
SHOWN = (
    *("runs/run", "runs/turn", "runs/toolinvocation", "runs/waitpoint", "runs/runevent", "runs/tool"),
    *("runs/agentmodel", "chats/chat", "chats/attachment", "credits/account", "credits/ledgerentry"),
    *("webhooks/endpoint", "webhooks/delivery", "webhooks/attempt", "apikeys/apikey", "auth/user"),
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
        databases = int(client.config_get("databases")["databases"])
    seen = 0
    for number in range(databases):
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


def test_admin_pages_show_content_only_where_permitted(world: World) -> None:
    """The content page holds no secret either."""
    kinds = set()
    for path, answer in crawl.pages(crawl.sign_in(world.stack.url, "boss", PASSWORD), world.stack.url):
        kinds.add(crawl.kind_of(path))
        assert answer.status_code == 200, path
        allowed = CONTENT if path.endswith("/content/") else ANSWERS if re.search(ANSWERED, path) else ()
        assert set(found(answer.text, world)) <= set(allowed), path
        if path == f"/admin/runs/run/{world.run['id']}/content/":
            assert {MESSAGE, TOOL_OUTPUT} <= set(found(answer.text, world))
    assert kinds >= {f"/admin/{model}/*/change/" for model in SHOWN}
    assert "/admin/runs/run/*/content/" in kinds


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
    assert metrics("runs_finished_total", status="failed", error="INTERNAL_ERROR") == 2
    assert metrics("tool_calls_total", tool="tool", outcome="COMPLETED") == 1
    assert metrics("webhook_lag_seconds_count") >= 2
    assert metrics("housekeeping_last_success_timestamp_seconds", job="sweep-runs") > time.time() - 60
    assert metrics("http_request_seconds_count", route="api/v1/runs/<str:runId>/stream") >= 1
    assert metrics("run_workers") == 1
    assert found(metrics.text, world) == []


def test_a_process_sends_its_last_metrics_when_it_ends(world: World) -> None:
    stack = world.stack
    stack.restart("web", {"METRICS_FLUSH_SECONDS": "60"})
    session = stack.session("ada")
    for _ in range(7):
        assert session.get("/models").status_code == 200
    stack.restart("web")
    answer = requests.get(f"{stack.url}/metrics", headers={"Authorization": "Bearer scraper"}, timeout=15)
    assert MetricsPage(answer.text)("http_requests_total", method="GET", route="api/v1/models", status="200") == 7
