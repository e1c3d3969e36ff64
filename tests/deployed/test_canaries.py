"""A service at work with everything switched on that watches it: canaries are where they belong and nowhere else, every
log line says whose it is, traces go through, and all processes' metrics are on one page.
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

# What users, models, tools and receivers said, and where staff may read it (docs/admin.md).
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


def test_the_canaries_were_there(world: World) -> None:
    """Or nothing that follows means anything."""
    assert world.stack.session("ada").get(f"/chats/{world.run['chatId']}/messages").text.count(MESSAGE) == 4
    kept = world.stack.manage("shell", "-c", "from webhooks.models import *; print(Attempt.objects.count())")
    assert int(kept.split()[-1]) >= 2
    assert [answer.status_code for answer in world.errors] == [500, 400, 400, 400, 404, 404, 500, 401, 401]


def test_no_log_line_holds_one(world: World) -> None:
    guilty = [(name, found(line, world), line) for name, line in lines_of(world) if found(line, world)]
    assert guilty == []


def test_what_broke_is_told_all_the_same(world: World) -> None:
    """By type and place: in the web process and in the worker."""
    text = "\n".join(line for _, line in lines_of(world))
    for name, place in (("web", "in start_run"), ("runs-1", "in record_turn")):
        broken = [line for process, line in lines_of(world) if process == name and "exception" in line]
        assert any("django.db.utils." in line and place in line for line in broken), name
    assert "Traceback (most recent call last)" not in text


def test_every_line_is_json_and_says_whose_it_is(world: World) -> None:
    told = []
    for name, line in lines_of(world):
        try:
            told.append(json.loads(line) | {"of": name})
        except ValueError:
            pytest.fail(f"{name} said what is no JSON: {line}")
    assert all(
        {"time", "level", "logger", "message", "request_id", "run_id", "task_id"} <= line.keys() for line in told
    )
    broken = [line for line in told if line["message"].endswith("failed for an unexpected reason")]
    assert {(line["of"], line["level"]) for line in broken} == {("runs-1", "ERROR")}
    assert all(line["run_id"].startswith("run_") for line in broken)
    by_request = {line["request_id"]: line for line in broken}
    assert by_request.keys() > {"untold"}
    # Found by a worker's own sweep, which is no task, or told of by beat's.
    assert re.fullmatch(r"wrk_\w+|[0-9a-f-]{36}", by_request.pop("untold")["task_id"])
    (line,) = by_request.values()
    assert len(line["request_id"]) == 32
    assert len(line["task_id"]) == 36


def test_an_answer_s_lines_name_its_run(world: World) -> None:
    lines = [json.loads(line) for name, line in lines_of(world) if name == "web" and "in respond" in line]
    assert [line["run_id"] for line in lines] == [world.asked["id"]]
    assert len(lines[0]["request_id"]) == 32


def test_the_broker_holds_ids_alone(world: World) -> None:
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


def test_errors_quote_nothing(world: World) -> None:
    for answer in world.errors:
        assert found(answer.text, world) == [], answer.text
        assert "Traceback" not in answer.text


def test_no_page_of_the_admin_holds_one_but_that_of_a_run_s_content(world: World) -> None:
    """Nor does that page hold a secret."""
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


def test_a_trace_goes_from_the_request_to_the_model_and_the_tool(world: World) -> None:
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


def test_a_trace_goes_on_where_no_message_led(world: World) -> None:
    spans = {span["name"]: span for span in world.outside.spans() if span["trace"] == UNTOLD_TRACE}
    assert spans.keys() >= {"asked", "run", "model"}
    assert spans["run"]["parent"] == spans["asked"]["id"]
    assert spans["model"]["parent"] == spans["run"]["id"]


def test_no_span_holds_one(world: World) -> None:
    bodies = world.outside.bodies("/v1/traces")
    assert bodies
    for body in bodies:
        assert found(body.decode("latin1"), world) == []
    # Failures are marked, with a type.
    assert "ModelError" in {span["error"] for span in world.outside.spans() if span["name"] == "model"}


def test_unexpected_exceptions_are_reported_without_content(world: World) -> None:
    reports = world.outside.reports()
    places = {
        frame["function"]
        for report in reports
        for error in report.get("exception", {}).get("values", [])
        for frame in error["stacktrace"]["frames"]
    }
    assert {"start_run", "record_turn"} <= places
    for report in reports:
        assert found(json.dumps(report), world) == []
    assert any(report["tags"]["run_id"].startswith("run_") for report in reports)


def test_figures_of_all_processes_are_on_one_page(world: World) -> None:
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


def test_a_process_hands_its_last_figures_in_when_it_ends(world: World) -> None:
    stack = world.stack
    stack.restart("web", {"METRICS_FLUSH_SECONDS": "60"})
    session = stack.session("ada")
    for _ in range(7):
        assert session.get("/models").status_code == 200
    stack.restart("web")
    answer = requests.get(f"{stack.url}/metrics", headers={"Authorization": "Bearer scraper"}, timeout=15)
    assert MetricsPage(answer.text)("http_requests_total", method="GET", route="api/v1/models", status="200") == 7
