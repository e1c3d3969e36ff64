"""A worker stops while calls of one user wait for their places: the calls that it has not begun are made elsewhere."""

import signal
import threading
from collections.abc import Iterator

import pytest

from tests.faults.load import NOT_NEEDED, OWNER, QUICK, Kind, Load, at_work
from tests.webhooks.receiver import answer, held

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]

# The tool must not be called twice. The calls of one turn are made one after another.
CALLS = Kind("/call book {}\n/call book {}\n/call book {}\n/say done", "done")
LIMITS = QUICK | {"TOOL_CALLS_PER_USER": "1", "RUN_SHUTDOWN_GRACE_SECONDS": "1"}


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work(environment=LIMITS, without=NOT_NEEDED) as load:
        yield load


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_calls_that_wait_are_made_by_another_worker(load: Load, number: signal.Signals) -> None:
    stack, release = load.stack, threading.Event()
    load.tools.behaviours = [held(release), answer(200, b'{"result": "ok"}')]
    run_id = load.start(CALLS)
    stack.wait_for(lambda: load.tools.under_way == 1, what="the first call")
    calls = load.driver.get(run_id)["toolInvocations"]
    assert [call["status"] for call in calls] == ["DISPATCHING", "PENDING", "PENDING"]
    (pid,) = load.sql(OWNER, run_id)[0]
    (name,) = [name for name, process in stack.processes.items() if process.pid == pid]
    stack.kill(name, number)
    stack.wait_for(lambda: not stack.processes[name].running, what="the worker's end")
    release.set()
    ended = load.driver.wait(run_id)["toolInvocations"]
    # Only the call that was under way was cut off.
    assert [(call["status"], call["errorCode"]) for call in ended] == [
        ("FAILED", "OUTCOME_UNKNOWN"),
        ("COMPLETED", None),
        ("COMPLETED", None),
    ]
    stack.restart(name)
    load.check()
