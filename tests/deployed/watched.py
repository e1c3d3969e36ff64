"""A service with logs, metrics, traces and error reports enabled, after every kind of user action and failure."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
import requests
from cryptography.fernet import Fernet

from tests.deployed.outside import (
    EXCEPTION,
    FILE,
    FILE_NAME,
    MESSAGE,
    MODEL_KEY,
    TOOL_SECRET,
    WRONG_CREDENTIAL,
    Outside,
    outside,
)
from tests.driver import Driver, until
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Client
from tests.streams.conftest import StreamStack

PASSWORD = "correct horse battery"
JSON = {"Content-Type": "application/json"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
UNTOLD_TRACE = "1af7651916cd43dd8448eb211c80319d"
CALLER = "b7ad6b7169203331"
CATALOGUE = f"""
from runs.models import AgentModel, Provider, Tool
for name in ("tool", "broken-tool"):
    Tool.objects.create(
        name=name.replace("-", "_"), display_name=name, description=name, node_type="http", price=0, approval="never",
        url="{{url}}/" + name, secret_headers='{{{{"X-Secret": "{TOOL_SECRET}"}}}}',
        input_schema={{{{"type": "object"}}}},
    )
for name in ("outside", "broken"):
    AgentModel.objects.create(
        name=name, display_name=name, provider_model=name, price_in=0, price_out=0,
        provider=Provider.objects.get(name="openai")
    )
"""
# Database errors that quote the row: for a message and an answer in a web process, for a recorded turn in a worker.
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
# A user who may see every page, and a run whose message never reached the broker. A sweep finds that run.
UNTOLD = f"""
from django.contrib.auth.models import User
from opentelemetry.propagate import extract
from chats.services import make_chat
from config.queue import publisher
from config.telemetry import tracing
from runs import services
from django.contrib.auth.models import Group
User.objects.create_superuser("boss", "", "{PASSWORD}")
for role in Group.objects.all():
    User.objects.create_user(role.name, password="{PASSWORD}", is_staff=True).groups.add(role)
publisher.nudge = lambda *message, **options: None
ada = User.objects.get(username="ada")
with tracing.span("asked", parent=extract({{"traceparent": "00-{UNTOLD_TRACE}-{CALLER}-01"}})):
    services.start_run(ada, make_chat(ada)[0].pk, message="/say boom-text {MESSAGE}", request_id="untold")
"""


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
    attachment: str = ""
    key_id: str = ""


@contextmanager
def watched() -> Iterator[World]:
    with outside() as beyond, RedisServer() as broker:
        services = given_services()
        settings = {
            "LOG_FORMAT": "json",
            "LOG_LEVEL": "DEBUG",
            "METRICS_TOKEN": "scraper",
            "config.settings.METRICS_FLUSH_SECONDS": "1",
            "config.settings.METRICS_CACHE_SECONDS": "0",
            "OTEL_EXPORTER_OTLP_ENDPOINT": beyond.url,
            "OTEL_BSP_SCHEDULE_DELAY": "1000",
            "SENTRY_DSN": f"{beyond.url.replace('//', '//public@')}/1",
            "OPENAI_BASE_URL": f"{beyond.url}/model",
            "OPENAI_API_KEY": MODEL_KEY,
            "DEBUG": "0",
            "ENCRYPTION_KEYS": Fernet.generate_key().decode(),
        }
        options = services | {"redis_url": broker.url()}
        catalogue = CATALOGUE.format(url=beyond.url)
        with StreamStack(**options, environment=settings, prepare=catalogue) as stack, listening(broker) as commands:
            stack.token("ada")
            stack.manage("shell", "-c", TRIGGERS + UNTOLD)
            world = World(stack, beyond, broker, commands)
            work(world)
            yield world


class listening:
    """Records every command that the broker receives, including task messages and published wake-ups."""

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
    """Do every kind of user action and cause every kind of failure, with canaries in all content."""
    stack, session = world.stack, world.stack.session("ada")
    driver = Driver(session)
    # The sign-up grant pays for everything.
    endpoint = session.post("/webhooks", json={"url": f"{world.outside.url}/hook"}).json()
    rotated = session.post("/webhooks", json={"url": f"{world.outside.url}/hook", "rotateSecret": True}).json()
    key = session.post("/api-keys", json={"name": "canary"}).json()
    world.secrets = [endpoint["secret"], rotated["secret"], key["secret"], stack.token("ada"), stack.api_key("ada")]
    world.secrets += [hashlib.sha256(key["secret"].encode()).hexdigest(), PASSWORD]
    world.secrets += [stack.environment[name] for name in ("SECRET_KEY", "ENCRYPTION_KEYS", "DATABASE_URL")]
    world.key_id = key["id"]
    chat = driver.chat()
    answer = session.post(
        f"/chats/{chat}/runs",
        json={"message": f"{MESSAGE}\n/call tool {{}}\n/say {{result}} {MESSAGE}"},
        headers={"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "from-outside"},
    )
    world.run = driver.wait(answer.json()["id"])
    assert world.run["status"] == "completed"
    world.attachment = attach(session)
    for message, options in (
        ("/say seen", {"attachmentIds": [world.attachment]}),
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
    # Wait for the last spans, reports and webhook attempts.
    until(lambda: any(span["name"] == "tool" for span in world.outside.spans()))
    until(lambda: any(span["name"] == "run" and span["trace"] == UNTOLD_TRACE for span in world.outside.spans()))
    until(lambda: len(world.outside.reports()) >= 4)
    until(lambda: len(world.outside.bodies("/hook")) >= 2)


def attach(session: Client) -> str:
    """Upload a file and return its id. Before that, one upload is incomplete and fails."""
    body = {"fileName": f"{FILE_NAME}.txt", "contentType": "text/plain", "sizeBytes": len(FILE)}
    for content in (FILE[:-1], FILE):
        made = session.post("/attachments", json=body).json()
        upload = made["upload"]
        requests.put(upload["url"], data=content, headers=upload["headers"], timeout=15)
        session.post(f"/attachments/{made['id']}/complete")
    return str(made["id"])
