"""The processes of the Procfile under load: they serve, they end within the platforms' time limit and lose nothing.

They start once, in one test: a start of all of them takes 20 s of CPU time.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import requests

from tests.deployed.deployment import Deployment
from tests.driver import Driver, until
from tests.faults.test_migration import WIDEN
from tests.stack.pgbouncer import BINARY, pgbouncer
from tests.stack.plugin import given_services
from tests.stack.process import python, run
from tests.streams.conftest import Listener
from tests.webhooks.receiver import Receiver, answer, receiving

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(450)]

GRACE_SECONDS = 30.0
# Fewer connections than the service has clients.
POOL = 8
# The paths whose tables the migration changes.
PATHS = ("/runs", "/chats", "/me/credits", "/webhooks/deliveries")
LOSSES = "from runs.models import Run; print(max(Run.objects.values_list('lease_losses', flat=True)))"
CATALOGUE = """
from runs.models import Tool
Tool.objects.create(
    name="slow", display_name="Slow", description="Slow.", node_type="http", price=1000000, approval="never",
    url="{url}", timeout_seconds=60, input_schema={{"type": "object"}},
)
"""


def late(seconds: float, body: bytes = b'{"result": "ok"}'):
    """A delayed response. The delay ends early if the receiver stops."""

    def behave(receiver, connection, request) -> None:
        receiver.stopped.wait(seconds)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    return behave


@contextmanager
def deployment(tool: str) -> Iterator[Deployment]:
    """Behind PgBouncer in transaction mode, where there is one."""
    with (
        pgbouncer(POOL) if BINARY else nullcontext() as url,
        Deployment(
            **given_services(),
            through=url,
            environment={
                "DATABASE_PGBOUNCER": "1",
                "WEB_WORKERS": "2",
                "LOG_FORMAT": "json",
                "config.settings.CREDIT_EXPIRY_SWEEP_SECONDS": "1",
                "SIGNUP_CREDITS": "100000",  # some are held for each turn of the many runs at once
            },
            prepare=CATALOGUE.format(url=tool),
        ) as deployed,
    ):
        yield deployed


def test_the_processes_serve_shut_down_and_lose_nothing_behind_pgbouncer() -> None:
    with receiving(late(8)) as tool, deployment(tool.url) as deployed:
        check_they_serve_during_a_migration(deployed)
        check_a_shutdown_under_load_ends_in_time_and_loses_nothing(deployed, tool)


def check_they_serve_during_a_migration(deployed: Deployment) -> None:
    session = deployed.session("ada")
    driver = Driver(session)
    with receiving() as hook:
        session.post("/webhooks", json={"url": hook.url})
        runs = [
            driver.start('/call calculate {"expression": "6*7"}\n/say It is {result}.\n/stream 20 20')
            for _ in range(10)
        ]
        asked = driver.ask("/ask Which?\n/say {result} it is")
        driver.respond(asked, kind="CLARIFICATION", answer="blue")
        cancelled = driver.start("/wait 60")
        driver.wait(cancelled["id"], "running")
        driver.cancel(cancelled["id"])
        assert {driver.wait(run["id"])["status"] for run in [*runs, asked]} == {"completed"}
        assert driver.wait(cancelled["id"])["status"] == "cancelled"
        listener = Listener(f"{deployed.stream_url}/api/v1", deployed.token("ada"))
        assert listener.all(runs[0]["id"])[-1][1] == "run.status"
        until(lambda: not session.get("/webhooks/deliveries?status=PENDING").json()["items"], 60)
        key = {"Idempotency-Key": "once"}
        chats = {session.post("/chats", json={}, headers=key).json()["id"] for _ in range(3)}
        assert len(chats) == 1
        # A migration changes every plan while all processes serve.
        with ThreadPoolExecutor(1) as pool:
            migrated = pool.submit(deployed.manage, "shell", "--no-imports", "-c", WIDEN)
            during: list[str] = []
            while not migrated.done():
                assert {session.get(path).status_code for path in PATHS} == {200}
                if len(during) < 8:
                    during.append(driver.start('/call calculate {"expression": "6*7"}\n/stream 20 20')["id"])
            migrated.result()
        for run_id in during:
            received = listener.all(run_id)
            assert (received[-1][1], received[-1][2]["status"]) == ("run.status", "completed")
        # This command uses server-side cursors.
        assert "Every account agrees" in deployed.manage("reconcile_credits")
    for name, process in deployed.processes.items():
        broken = [line for line in process.log.read_text().splitlines() if '"level": "ERROR"' in line]
        assert broken == [], name
    if BINARY:
        # Without the setting, connections use features that PgBouncer does not support.
        refused = run(python("manage.py", "reconcile_credits"), deployed.environment | {"DATABASE_PGBOUNCER": "0"})
        assert "unsupported startup parameter" in refused.stderr


def check_a_shutdown_under_load_ends_in_time_and_loses_nothing(deployed: Deployment, tool: Receiver) -> None:
    session = deployed.session("bob")
    driver = Driver(session)
    with receiving(late(6), late(6), answer()) as hook:
        session.post("/webhooks", json={"url": hook.url})
        calling = driver.start("/call slow {}\n/say and {result}")
        long = driver.start("/stream 60 300\n/say and the end")
        waiting = driver.ask("/ask Which?\n/say {result} it is")
        until(lambda: len(tool.requests) == 1 and len(hook.requests) >= 2)
        slow: list[requests.Response] = []
        # A request that is in progress when the signal arrives.
        client = deployed.public("bob")
        asking = threading.Thread(
            target=lambda: slow.append(
                client.post(
                    f"{deployed.url}/api/mcp",
                    json={
                        "jsonrpc": "2.0",
                        "id": 1,
                        "method": "tools/call",
                        "params": {
                            "name": "start_run",
                            "arguments": {"chatId": driver.chat(), "message": "/wait 3", "waitSeconds": 5},
                        },
                    },
                    headers={"Accept": "application/json, text/event-stream"},
                    timeout=40,
                )
            )
        )
        asking.start()
        until(lambda: session.get("/runs").json()["items"][0]["id"] not in (long["id"], waiting["id"], calling["id"]))
        took = deployed.shut_down()
        assert {name: seconds for name, seconds in took.items() if seconds > GRACE_SECONDS - 2} == {}
        asking.join()
        assert [answer.status_code for answer in slow] == [200]
        # One of each kind finishes what is left.
        deployed.start_again("web", "runs-1", "webhooks", "maintenance", "beat")
        driver.respond(driver.get(waiting["id"]), kind="CLARIFICATION", answer="blue")
        for started, ending in ((calling, "and ok"), (long, "and the end"), (waiting, "blue it is")):
            ended = driver.wait(started["id"], timeout=90)
            assert ended["status"] == "completed"
            assert driver.content(ended).endswith(ending)
        # Calls to servers outside were neither interrupted nor repeated.
        assert len(tool.requests) == 1
        until(lambda: not session.get("/webhooks/deliveries?status=PENDING").json()["items"], 60)
        deliveries = session.get("/webhooks/deliveries?limit=100").json()["items"]
        assert {(delivery["status"], len(delivery["attempts"])) for delivery in deliveries} == {("DELIVERED", 1)}
        assert deployed.manage("shell", "-c", LOSSES).split()[-1] == "0"
        assert "All invariants hold." in deployed.manage("check_invariants")
