"""A service at work with everything switched on that watches it: canaries are where they belong and nowhere else, every
log line says whose it is, traces go through, and all processes' figures are on one page.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import requests

from tests.deployed import crawl
from tests.deployed.outside import (
    CANARIES,
    EXCEPTION,
    FILE,
    FILE_NAME,
    MESSAGE,
    MODEL_ERROR,
    MODEL_KEY,
    MODEL_OUTPUT,
    RECEIVER_ANSWER,
    TOOL_OUTPUT,
    TOOL_SECRET,
    WRONG_CREDENTIAL,
    Outside,
    outside,
)
from tests.driver import Driver, until
from tests.operations.conftest import Figures
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Client
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(240)]

PASSWORD = "correct horse battery"
JSON = {"Content-Type": "application/json"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
UNTOLD_TRACE = "1af7651916cd43dd8448eb211c80319d"
CALLER = "b7ad6b7169203331"
CATALOGUE = f"""
from runs.models import AgentModel, Tool
for name in ("tool", "broken-tool"):
    Tool.objects.create(
        name=name.replace("-", "_"), display_name=name, description=name, node_type="http", price=0, approval="never",
        url="{{url}}/" + name, secret_headers='{{{{"X-Secret": "{TOOL_SECRET}"}}}}',
        input_schema={{{{"type": "object"}}}},
    )
for name in ("outside", "broken"):
    AgentModel.objects.create(
        name=name, display_name=name, provider="openai", provider_model=name, price_in=0, price_out=0
    )
"""
# What fails deep inside, quoting what it choked on: a message and an answer in a web process, a recorded turn in a
# worker.
TRIGGERS = f"""
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute(
        "CREATE FUNCTION boom() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{EXCEPTION}'; END $$"
    )
    for table, column, what in (
        ("chats_message", "content", "INSERT"), ("runs_turn", "text", "INSERT"), ("runs_waitpoint", "status", "UPDATE")
    ):
        cursor.execute(
            f"CREATE TRIGGER {{table}}_boom BEFORE {{what}} ON {{table}} FOR EACH ROW "
            f"WHEN (NEW::text LIKE '%boom-{{column}}%') EXECUTE FUNCTION boom()"
        )
"""
# Somebody who may see every page; and a run whose message the broker never got: a sweep finds it.
UNTOLD = f"""
from django.contrib.auth.models import User
from opentelemetry.propagate import extract
from chats.services import create_chat
from config.api import broker, tracing
from runs import services
User.objects.create_superuser("boss", "", "{PASSWORD}")
broker.nudge = lambda *message, **options: None
ada = User.objects.get(username="ada")
with tracing.span("asked", parent=extract({{"traceparent": "00-{UNTOLD_TRACE}-{CALLER}-01"}})):
    services.start_run(ada, create_chat(ada).pk, message="/say boom-text {MESSAGE}", request_id="untold")
"""


# What users, models, tools and receivers said, and where staff may read it (docs/admin.md).
CONTENT = (MESSAGE, TOOL_OUTPUT, MODEL_OUTPUT, MODEL_ERROR, FILE, FILE_NAME)
ANSWERS, ANSWERED = (RECEIVER_ANSWER,), r"/webhooks/(attempt|delivery)/.+/change/"
SHOWN = (
    *("runs/run", "runs/turn", "runs/toolinvocation", "runs/waitpoint", "runs/runevent", "runs/tool"),
    *("runs/agentmodel", "chats/chat", "chats/attachment", "credits/account", "credits/ledgerentry"),
    *("webhooks/endpoint", "webhooks/delivery", "webhooks/attempt", "apikeys/apikey", "auth/user"),
)


@dataclass
class World:
    stack: StreamStack
    outside: Outside
    broker: RedisServer
    commands: list[str] = field(default_factory=list)
    errors: list[requests.Response] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with outside() as beyond, RedisServer() as broker:
        services = given_services()
        watched = {
            "LOG_FORMAT": "json",
            "LOG_LEVEL": "DEBUG",
            "METRICS_TOKEN": "scraper",
            "METRICS_FLUSH_SECONDS": "0.3",
            "METRICS_CACHE_SECONDS": "0",
            "OTEL_EXPORTER_OTLP_ENDPOINT": beyond.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "SENTRY_DSN": f"{beyond.url.replace('//', '//public@')}/1",
            "OPENAI_BASE_URL": f"{beyond.url}/model",
            "OPENAI_API_KEY": MODEL_KEY,
            "DEBUG": "0",
        }
        options = services | {"redis_url": broker.url()}
        with StreamStack(**options, environment=watched) as stack, listening(broker) as commands:
            stack.token("ada")
            stack.manage("shell", "-c", CATALOGUE.format(url=beyond.url))
            stack.restart("runs-1")  # else it may not know of the tools when the first run calls them
            stack.manage("shell", "-c", TRIGGERS + UNTOLD)
            world = World(stack, beyond, broker, commands)
            work(world)
            yield world


class listening:
    """Every command that the broker gets, task messages and published wake-ups among them."""

    def __init__(self, broker: RedisServer) -> None:
        self.broker, self.commands, self.over = broker, [], threading.Event()

    def __enter__(self) -> list[str]:
        self.client = self.broker.client()
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        return self.commands

    def listen(self) -> None:
        with self.client.monitor() as monitor:
            while not self.over.is_set():
                try:
                    self.commands.append(str(monitor.next_command()["command"]))
                except (redis.RedisError, OSError, ValueError):
                    time.sleep(0.01)

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join(10)


def work(world: World) -> None:
    """Every kind of thing that users do, and every kind of failure, with canaries in all of it."""
    stack, session = world.stack, world.stack.session("ada")
    driver = Driver(session)
    # From the sign-up's grant everything is paid.
    endpoint = session.post("/webhooks", json={"url": f"{world.outside.url}/hook"}).json()
    rotated = session.post("/webhooks", json={"url": f"{world.outside.url}/hook", "rotateSecret": True}).json()
    key = session.post("/api-keys", json={"name": "canary"}).json()
    world.secrets = [endpoint["secret"], rotated["secret"], key["secret"], stack.token("ada")]
    chat = driver.chat()
    answer = session.post(
        f"/chats/{chat}/runs",
        json={"message": f"{MESSAGE}\n/call tool {{}}\n/say {{result}} {MESSAGE}"},
        headers={"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "from-outside"},
    )
    world.run = driver.wait(answer.json()["id"])
    assert world.run["status"] == "completed"
    attached = attach(session)
    for message, options in (
        ("/say seen", {"attachmentIds": [attached]}),
        (f"/call broken_tool {{}}\n/fail {MESSAGE}", {}),
        (MESSAGE, {"model": "outside"}),
        (MESSAGE, {"model": "broken"}),
        (f"/say boom-text {MESSAGE}", {}),
        (
            f'/call calculate {{"expression": "{MESSAGE}"}}\n/call web_fetch {{"url": "http://127.0.0.1:1/{MESSAGE}"}}',
            {},
        ),
    ):
        driver.finish(message, **options)
    stream = stack.listener("stream").all(world.run["id"])
    assert stream[-1][1] == "run.status"
    public = stack.public("ada")
    world.asked = driver.ask(f"/ask Which {MESSAGE}?")
    asked = f"/waitpoints/{world.asked['pendingWaitpoint']['id']}/respond"
    for call in (
        lambda: session.post(f"/chats/{chat}/runs", json={"message": f"boom-content {MESSAGE}"}),
        lambda: session.post(f"/chats/{chat}/runs", data=f'{{"message": "{MESSAGE}', headers=JSON),
        lambda: session.post(f"/chats/{chat}/runs", json={"message": MESSAGE, "maxCredits": MESSAGE}),
        lambda: session.get(f"/chats?cursor={MESSAGE}"),
        lambda: session.get(f"/chats/{MESSAGE}"),
        lambda: public.post("/waitpoints/wp_none/respond", json={"kind": MESSAGE}),
        lambda: session.post(asked, json={"kind": "CLARIFICATION", "answer": f"boom-status {MESSAGE}"}),
        lambda: requests.get(f"{stack.url}/api/v1/me", headers={"Authorization": f"Bearer {WRONG_CREDENTIAL}"}),
        lambda: requests.get(
            f"{stack.url}/api/public/v1/runs", headers={"Authorization": f"Bearer awk_{WRONG_CREDENTIAL}"}
        ),
    ):
        world.errors.append(call())
    # The last spans, reports and attempts are on their way.
    until(lambda: any(span["name"] == "tool" for span in world.outside.spans()))
    until(lambda: any(span["name"] == "run" and span["trace"] == UNTOLD_TRACE for span in world.outside.spans()))
    until(lambda: len(world.outside.reports()) >= 4)
    until(lambda: len(world.outside.bodies("/hook")) >= 2)


def attach(session: Client) -> str:
    """An uploaded file, ready for a message; one upload that breaks off on the way."""
    body = {"fileName": f"{FILE_NAME}.txt", "contentType": "text/plain", "sizeBytes": len(FILE)}
    for content in (FILE[:-1], FILE):
        made = session.post("/attachments", json=body).json()
        upload = made["upload"]
        requests.put(upload["url"], data=content, headers=upload["headers"], timeout=15)
        session.post(f"/attachments/{made['id']}/complete")
    return str(made["id"])


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
    def shown() -> Figures:
        answer = requests.get(f"{world.stack.url}/metrics", headers={"Authorization": "Bearer scraper"}, timeout=15)
        assert answer.status_code == 200
        return Figures(answer.text)

    until(lambda: (shown()("webhook_attempts_total", outcome="5xx") or 0) >= 2)
    figures = shown()
    # web · a run worker · the webhook worker · the maintenance worker · the stream process
    assert figures("http_requests_total", method="POST", route="api/v1/chats/<str:chatId>/runs", status="201") == 8
    assert figures("runs_finished_total", status="failed", error="INTERNAL_ERROR") == 2
    assert figures("tool_calls_total", tool="tool", outcome="COMPLETED") == 1
    assert figures("webhook_lag_seconds_count") >= 2
    assert figures("housekeeping_last_success_timestamp_seconds", job="sweep-runs") > time.time() - 60
    assert figures("http_request_seconds_count", route="api/v1/runs/<str:runId>/stream") >= 1
    assert figures("run_workers") == 1
    assert found(figures.text, world) == []


def test_a_process_hands_its_last_figures_in_when_it_ends(world: World) -> None:
    stack = world.stack
    stack.restart("web", {"METRICS_FLUSH_SECONDS": "60"})
    session = stack.session("ada")
    for _ in range(7):
        assert session.get("/models").status_code == 200
    stack.restart("web")
    answer = requests.get(f"{stack.url}/metrics", headers={"Authorization": "Bearer scraper"}, timeout=15)
    assert Figures(answer.text)("http_requests_total", method="GET", route="api/v1/models", status="200") == 7
