"""The processes of the Procfile under load: they serve, they end within the platforms' time limit and lose nothing."""

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.deployed.deployment import Deployment
from tests.driver import Driver, until
from tests.faults.test_migration import WIDEN
from tests.stack.pgbouncer import BINARY, MISSING, pgbouncer
from tests.stack.plugin import given_services
from tests.streams.conftest import Listener
from tests.webhooks.receiver import answer, receiving

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(300)]

GRACE_SECONDS = 30.0
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


def test_a_shutdown_under_load_ends_in_time_and_loses_nothing() -> None:
    with (
        receiving(late(8)) as tool,
        receiving(late(6), late(6), answer()) as hook,
        Deployment(
            **given_services(),
            environment={"WEB_WORKERS": "2", "LOG_FORMAT": "json"},
            prepare=CATALOGUE.format(url=tool.url),
        ) as deployed,
    ):
        session = deployed.session("ada")
        session.post("/webhooks", json={"url": hook.url})
        driver = Driver(session)
        calling = driver.start("/call slow {}\n/say and {result}")
        long = driver.start("/stream 180 100\n/say and the end")
        waiting = driver.ask("/ask Which?\n/say {result} it is")
        until(lambda: len(tool.requests) == 1 and len(hook.requests) >= 2)
        slow: list[requests.Response] = []
        # A request that is in progress when the signal arrives.
        client = deployed.public("ada")
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
        deployed.start_again()
        driver.respond(driver.get(waiting["id"]), kind="CLARIFICATION", answer="blue")
        for run, ending in ((calling, "and ok"), (long, "and the end"), (waiting, "blue it is")):
            ended = driver.wait(run["id"], timeout=90)
            assert ended["status"] == "completed"
            assert driver.content(ended).endswith(ending)
        # Calls to servers outside were neither interrupted nor repeated.
        assert len(tool.requests) == 1
        until(lambda: not session.get("/webhooks/deliveries?status=PENDING").json()["items"], 60)
        deliveries = session.get("/webhooks/deliveries?limit=100").json()["items"]
        assert {(delivery["status"], len(delivery["attempts"])) for delivery in deliveries} == {("DELIVERED", 1)}
        assert deployed.manage("shell", "-c", LOSSES).split()[-1] == "0"
        assert "All invariants hold." in deployed.manage("check_invariants")


LOSSES = "from runs.models import Run; print(max(Run.objects.values_list('lease_losses', flat=True)))"


# --- behind PgBouncer ------------------------------------------------------------------------------------------------
POOL = 8
# The paths whose tables the migration changes.
PATHS = ("/runs", "/chats", "/me/credits", "/webhooks/deliveries")


@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_the_service_works_behind_pgbouncer_in_transaction_mode() -> None:
    with (
        receiving() as hook,
        pgbouncer(POOL) as url,  # fewer connections than the service has clients
        Deployment(
            **given_services(),
            through=url,
            environment={
                "DATABASE_PGBOUNCER": "1",
                "LOG_FORMAT": "json",
                "config.settings.CREDIT_EXPIRY_SWEEP_SECONDS": "1",
                "SIGNUP_CREDITS": "100000",  # some are held for each turn of the many runs at once
            },
        ) as deployed,
    ):
        session = deployed.session("ada")
        session.post("/webhooks", json={"url": hook.url})
        driver = Driver(session)
        runs = [
            driver.start('/call calculate {"expression": "6*7"}\n/say It is {result}.\n/stream 20 20')
            for _ in range(30)
        ]
        asked = driver.ask("/ask Which?\n/say {result} it is")
        driver.respond(asked, kind="CLARIFICATION", answer="blue")
        cancelled = driver.start("/wait 60")
        driver.wait(cancelled["id"], "running")
        driver.cancel(cancelled["id"])
        assert {driver.wait(run["id"])["status"] for run in [*runs, asked]} == {"completed"}
        assert driver.wait(cancelled["id"])["status"] == "cancelled"
        received = Listener(f"{deployed.stream_url}/api/v1", deployed.token("ada")).all(runs[0]["id"])
        assert received[-1][1] == "run.status"
        until(lambda: not session.get("/webhooks/deliveries?status=PENDING").json()["items"], 60)
        key = {"Idempotency-Key": "once"}
        chats = {session.post("/chats", json={}, headers=key).json()["id"] for _ in range(3)}
        assert len(chats) == 1
        # A migration changes every plan while all processes serve.
        with ThreadPoolExecutor(1) as pool:
            migrated = pool.submit(deployed.manage, "shell", "--no-imports", "-c", WIDEN)
            during = []
            while not migrated.done():
                assert {session.get(path).status_code for path in PATHS} == {200}
                during.append(driver.start('/call calculate {"expression": "6*7"}\n/stream 20 20')["id"])
            migrated.result()
        for run_id in during:
            received = Listener(f"{deployed.stream_url}/api/v1", deployed.token("ada")).all(run_id)
            assert (received[-1][1], received[-1][2]["status"]) == ("run.status", "completed")
        # These commands use server-side cursors.
        assert "All invariants hold." in deployed.manage("check_invariants")
        assert "Every account agrees" in deployed.manage("reconcile_credits")
        for name, process in deployed.processes.items():
            broken = [line for line in process.log.read_text().splitlines() if '"level": "ERROR"' in line]
            assert broken == [], name
        # Without the setting, connections use features that PgBouncer does not support.
        refused = subprocess.run(
            [shutil.which("python", path=deployed.environment["PATH"]) or "python", "manage.py", "reconcile_credits"],
            env=deployed.environment | {"DATABASE_PGBOUNCER": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "unsupported startup parameter" in refused.stderr
