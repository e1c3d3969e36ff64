"""Real worker processes that die during runs."""

import pytest

from tests.driver import Driver
from tests.faults.load import RUNS_ALONE, require_correct_data
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

SHORT_LEASES = {"RUN_LEASE_SECONDS": "2", "config.settings.RUN_SWEEP_SECONDS": "0.5"}


def test_killed_workers_lose_nothing(make_stack) -> None:
    """SIGKILL to every worker during five runs: all complete after a restart, and nothing is charged twice."""
    stack: Stack = make_stack(run_workers=2, environment=SHORT_LEASES, without=RUNS_ALONE)
    driver = Driver(stack.session())
    message = "\n".join(
        [
            '/call calculate {"expression": "1+1"}',
            "/usage 100 100",
            "/stream 20 60",
            '/call calculate {"expression": "2+2"}',
            "/usage 100 100",
            "/say {result}",
        ]
    )
    runs = [driver.start(message)["id"] for _ in range(5)]
    stack.wait_for(lambda: all(driver.get(run)["toolInvocations"] for run in runs))
    for name in ("runs-1", "runs-2"):
        stack.kill(name)
    assert {driver.get(run)["status"] for run in runs} == {"running"}
    stack.restart("runs-1", "runs-2")
    ended = [driver.wait(run, timeout=40) for run in runs]
    assert {run["status"] for run in ended} == {"completed"}
    for run in ended:
        assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"] * 2
        # Two calls at 0.1 and three turns. The usage of the first turn is estimated, the others report theirs.
        first_turn = run["totalCreditsUsed"] - 0.2 - 2 * 0.2
        assert 0 < first_turn < 0.2
        assert driver.content(run).endswith("4")
    assert driver.credits()["held"] == "0"
    spent = sum(round(run["totalCreditsUsed"] * 1_000_000) for run in ended)
    assert round(float(driver.credits()["balance"]) * 1_000_000) == 100_000_000 - spent
    require_correct_data(stack)


@pytest.mark.timeout(240)
def test_runs_that_wait_for_credits_outlive_their_workers(make_stack) -> None:
    """The credits suffice for all runs, but for the holds of two at a time. Nothing is lost when workers die."""
    environment = SHORT_LEASES | {"SIGNUP_CREDITS": "13"}
    stack: Stack = make_stack(run_workers=2, environment=environment, without=RUNS_ALONE)
    driver = Driver(stack.session())
    runs = [driver.start("/wait 1\n/say ok")["id"] for _ in range(12)]
    stack.wait_for(lambda: float(driver.credits()["available"]) < 1, what="holds of most credits")
    waiting = runs.pop()
    driver.cancel(waiting)
    for name in ("runs-1", "runs-2"):
        stack.kill(name)
    stack.restart("runs-1")
    assert {driver.wait(run, timeout=120)["status"] for run in runs} == {"completed"}
    assert driver.get(waiting)["status"] == "cancelled"
    assert driver.credits()["held"] == "0"
    require_correct_data(stack)


@pytest.mark.faults
@pytest.mark.services
@pytest.mark.timeout(180)
def test_a_run_that_always_kills_its_worker_fails(make_stack) -> None:
    """The run fails after the default five lost leases, and nothing is charged."""
    stack: Stack = make_stack(environment=SHORT_LEASES | {"RUN_LEASE_SECONDS": "1"}, without=RUNS_ALONE)
    driver = Driver(stack.session())
    stack.kill("runs-1")
    process = stack.processes["runs-1"]
    process.environment["CRASH_POINT"] = "before_model"
    run = driver.start("Hello")
    for _ in range(5):
        process.start()
        process.wanted = False
        stack.wait_for(lambda: not process.running, timeout=40)
        assert driver.get(run["id"])["status"] == "running"
    del process.environment["CRASH_POINT"]
    stack.restart("runs-1")
    run = driver.wait(run["id"], timeout=40)
    assert (run["status"], run["errorCode"]) == ("failed", "WORKER_LOST")
    assert driver.credits() == {"balance": "100", "held": "0", "available": "100", "expiring": []}
    assert driver.finish("Hello")["status"] == "completed"
    require_correct_data(stack)
