"""Tests of many concurrent runs: in one worker process, in several, and of one user and others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.driver import Driver
from tests.stack.plugin import given_services
from tests.stack.process import Process, free_port, python
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services]

MANY = 200
CONNECTIONS_MAX = 20
CAPACITY = 30
USER_LIMIT = 15
# No test needs them, and each is a process.
WITHOUT = ("beat", "webhooks", "maintenance")
# Credits are held for the turn of each run.
CREDITS = {"SIGNUP_CREDITS": "100000"}
SLOW_MODEL = """
from runs.models import AgentModel, Provider
AgentModel.objects.create(name="slow", display_name="Slow", provider=Provider.objects.get(name="openai"),
    provider_model="chunks=500&ms=4000", price_in=0, price_out=0, enabled=True)
"""


class Crowd:
    """Users of a stack who start many runs, with access to the stack's database."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.sql = psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True)

    def start(self, user: str, count: int, message: str, **body: Any) -> list[str]:
        driver = Driver(self.stack.session(user))
        with ThreadPoolExecutor(8) as pool:
            started = [pool.submit(driver.start, message, **body) for _ in range(count)]
            return [future.result()["id"] for future in started]

    def cancel(self, user: str, runs: list[str]) -> None:
        http = self.stack.session(user)
        with ThreadPoolExecutor(8) as pool:
            assert {answer.status_code for answer in pool.map(http.post, [f"/runs/{run}/cancel" for run in runs])} == {
                200
            }

    def count(self, condition: str, *values: object) -> int:
        row = self.sql.execute(f"SELECT count(*) FROM runs_run WHERE {condition}", values).fetchone()
        assert row is not None
        return int(row[0])

    def waiting(self, user: str) -> list[str]:
        """Return the user's throttled runs, oldest first."""
        rows = self.sql.execute(
            "SELECT r.id FROM runs_run r JOIN auth_user u ON u.id = user_id WHERE throttled AND u.username = %s"
            " ORDER BY r.created_at, r.id",
            (user,),
        ).fetchall()
        return [row[0] for row in rows]

    def running(self) -> int:
        return self.count("status = 'running' AND worker_id IS NOT NULL")

    def executed(self) -> list[int]:
        """Return the number of runs that each worker executes."""
        rows = self.sql.execute(
            "SELECT count(r.id) FROM runs_worker w LEFT JOIN runs_run r ON r.worker_id = w.id AND r.status = 'running'"
            " GROUP BY w.id"
        ).fetchall()
        return sorted(row[0] for row in rows)


@pytest.fixture
def slow_model(tmp_path: Path) -> Iterator[str]:
    """The address of a model that emits a word every few seconds."""
    port = free_port()
    process = Process("model", python("-m", "tests.llm.model_server", "--port", str(port)), log=tmp_path / "log")
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()


@pytest.mark.timeout(300)
def test_one_process_executes_hundreds_of_slow_runs(make_stack: Any, slow_model: str) -> None:
    environment = CREDITS | {"RUN_USER_LIMIT": "0", "OPENAI_BASE_URL": slow_model, "OPENAI_API_KEY": "made-up"}
    stack = make_stack(environment=environment, prepare=SLOW_MODEL, without=WITHOUT)
    crowd = Crowd(stack)
    runs = crowd.start("ada", 100, "/wait 600")
    crowd.start("ada", 60, "/stream 150 4000")
    crowd.start("ada", MANY - 160, "Hello", model="slow")
    stack.wait_for(lambda: crowd.running() == MANY, 120, f"{MANY} runs under way")
    popen = stack.processes["runs-1"].popen
    assert popen is not None
    port = crowd.sql.info.port
    held = [peer for peer in psutil.Process(popen.pid).net_connections("tcp") if peer.raddr and peer.raddr.port == port]
    assert 0 < len(held) <= CONNECTIONS_MAX
    # The process still receives cancellations of its runs.
    crowd.cancel("ada", runs[:10])
    stack.wait_for(lambda: crowd.count("status = 'cancelled'") == 10, 30, "10 cancelled runs")
    assert crowd.running() == MANY - 10


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    environment = CREDITS | {"RUN_WORKER_CAPACITY": str(CAPACITY), "RUN_USER_LIMIT": str(USER_LIMIT)}
    with Stack(**given_services(), run_workers=2, environment=environment, without=WITHOUT) as stack:
        yield Crowd(stack)


@pytest.mark.timeout(300)
def test_two_processes_share_runs_and_no_run_waits_while_one_has_capacity(crowd: Crowd) -> None:
    started = {f"user{number}": crowd.start(f"user{number}", USER_LIMIT, "/wait 600") for number in range(2)}
    crowd.stack.wait_for(lambda: crowd.running() == CAPACITY, 60, "half of what fits, under way")
    assert min(crowd.executed()) >= CAPACITY / 5, crowd.executed()
    started |= {f"user{number}": crowd.start(f"user{number}", USER_LIMIT, "/wait 600") for number in range(2, 4)}
    crowd.stack.wait_for(lambda: crowd.running() == 2 * CAPACITY, 60, "all that fits, under way")
    assert crowd.executed() == [CAPACITY, CAPACITY]
    for user, runs in started.items():
        crowd.cancel(user, runs)
    crowd.stack.wait_for(lambda: crowd.running() == 0, 60, "room again")


def test_many_runs_of_one_user_do_not_delay_other_users(crowd: Crowd) -> None:
    crowd.start("crowd", 100, "/wait 5")
    run = Driver(crowd.stack.session("single")).finish("Hello")
    left = crowd.count("throttled")
    assert run["status"] == "completed"
    assert left > 0, "the crowd was through before the other's first run"
    assert crowd.running() <= USER_LIMIT
    # Once each run has started or been throttled, the throttled ones start in order. Those that are claimed at the same
    # moment may change places.
    crowd.stack.wait_for(
        lambda: crowd.count("status = 'queued' AND NOT throttled") == 0, 60, "the crowd's runs, each claimed once"
    )
    waiting = crowd.waiting("crowd")
    crowd.stack.wait_for(lambda: len(crowd.waiting("crowd")) <= len(waiting) - USER_LIMIT, 60, "the next runs' start")
    left_behind = crowd.waiting("crowd")
    started = [run for run in waiting if run not in left_behind]
    assert set(started) <= set(waiting[: len(started) + USER_LIMIT])
