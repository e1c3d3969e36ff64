"""Outages that last longer than every cache, lease and connection: each run in progress is completed, and is charged
once.
"""

import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import requests

from tests.faults.load import PLAIN, QUESTION, QUICK, Kind, Load, at_work, slow_result
from tests.stack.postgres import PostgresServer
from tests.webhooks.receiver import Received, Receiver

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

# An outage is longer than these, and the leases of QUICK.
SHORT_LIVED = QUICK | {
    "config.kernel.clock.DATABASE_CLOCK_SECONDS": "4",
    "config.settings.DATABASE_CONN_MAX_AGE": "5",
    "PLAYGROUND": "1",
    # A busy machine may give a process no time for two seconds. Before the outage, no lease or connection may be lost.
    "RUN_LEASE_SECONDS": "5",
    "config.settings.DATABASE_IDLE_TRANSACTION_SECONDS": "5",
}
OUTAGE_SECONDS = 10
# The models end in the outage of the database: before it ends, if it begins a second after the runs, and after it
# began, if it begins 10 s after them.
MODEL_SECONDS = 10
# One of the calls is always under way, for at least 10 s, until the test needs no more of them.
CALL_SECONDS = 0.5
enough = threading.Event()
TOOLS = Kind("\n".join(["/call look_up {}\n/call look_up {}\n/say next"] * 16 + ["/say done"]), "done")


def slower(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    enough.wait(CALL_SECONDS)
    slow_result(receiver, connection, request)


@pytest.fixture(scope="module")
def load(postgres_server: PostgresServer) -> Iterator[Load]:
    with at_work(database_url=postgres_server.url(), environment=SHORT_LIVED) as load:
        load.tools.behaviours = [slower]
        yield load


def start(load: Load) -> list[str]:
    """Ten runs: some receive a model's stream or wait for a model, some make tool calls, and some wait for an answer,
    which this function leaves to ``check``. Returns the ids of the last.
    """
    enough.clear()
    asked = load.start_all(*[QUESTION] * 2)
    for run_id in asked:
        load.driver.wait(run_id, "waiting")
    stream = Kind(f"/stream {MODEL_SECONDS * 10} 100\n/say and the end", "and the end")
    wait = Kind(f"/wait {MODEL_SECONDS}\n/call book {{}}\n/say the end", "the end")
    busy = load.start_all(*[stream] * 3, *[wait] * 2, *[TOOLS] * 3)
    streams, tools = busy[:3], busy[5:]
    find = load.driver.get
    load.stack.wait_for(lambda: all(find(run_id)["lastStreamIndex"] > 4 for run_id in streams), what="streamed text")
    load.stack.wait_for(lambda: all(find(run_id)["toolInvocations"] for run_id in tools), what="calls of tools")
    assert {run_id: find(run_id)["status"] for run_id in busy} == dict.fromkeys(busy, "running")
    return asked


def check(load: Load, asked: list[str]) -> None:
    enough.set()
    for run_id in asked:
        load.respond(load.driver.get(run_id)["pendingWaitpoint"])
    load.check(timeout=120)
    # All workers came back: none has taken another's runs.
    assert load.sql("SELECT coalesce(sum(lease_losses), 0) FROM runs_run") == [(0,)]


def test_the_database_is_away_for_long(load: Load, postgres_server: PostgresServer) -> None:
    load.nobody_answers()
    # They stop before the runs start, because this takes a busy machine long.
    restarted = [load.stack.processes[name] for name in ("webhooks", "maintenance", "beat")]
    for process in restarted:
        process.stop()
    asked = start(load)
    postgres_server.stop()
    away_since = time.monotonic()
    # Processes that start in an outage wait like the others.
    for process in restarted:
        process.start()
    load.stack.add_worker("runs-3", "runs")
    load.broker().send_task("webhooks.deliver_due", queue="webhooks")
    for path in ("/admin/", "/admin/runs/run/", "/playground"):
        answered = requests.get(f"{load.stack.url}{path}", cookies={"sessionid": "x" * 32}, timeout=15)
        assert (answered.status_code, answered.headers["Content-Type"]) == (503, "text/html; charset=utf-8"), path
        assert int(answered.headers["Retry-After"]) >= 1
        assert "Traceback" not in answered.text
    assert load.http.get("/runs").json()["error"]["code"] == "UNAVAILABLE"
    time.sleep(max(0.0, away_since + OUTAGE_SECONDS - time.monotonic()))
    postgres_server.start()
    load.stack.wait_until_ready("web", "runs-3")
    check(load, asked)
    workers = ("runs-1", "runs-2", "runs-3", "webhooks", "maintenance")
    for name in workers:
        log = load.stack.processes[name].log
        load.stack.wait_for(
            lambda log=log: "database is available again" in log.read_text(), what=f"the end of the outage of {name}"
        )
        lines = re.findall("the database is .*", log.read_text())
        assert len(lines) == 2, lines
    for name in (*workers, "beat"):
        log = load.stack.processes[name].log.read_text()
        assert not re.search('"exception"|Traceback', log), log
    # The worker that started in the outage executes runs.
    for name in ("runs-1", "runs-2"):
        load.stack.kill(name)
    load.start(PLAIN)
    load.check()
    load.stack.restart("runs-1", "runs-2")
    load.stack.kill("runs-3")


def test_all_processes_are_suspended_for_long(load: Load) -> None:
    load.nobody_answers()
    asked = start(load)
    processes = [name for name, process in load.stack.processes.items() if process.running]
    for name in processes:
        load.stack.pause(name)
    time.sleep(OUTAGE_SECONDS)
    for name in processes:
        load.stack.resume(name)
    check(load, asked)
