"""Workers whose clocks are wrong by hours: nothing expires early and nothing starts twice."""

import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.faults.load import QUESTION, QUICK, Load, at_work

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]

MISSING = "libfaketime is needed to set processes' clocks wrong; on Debian: apt-get install -y libfaketime"
HOURS = {"runs-1": 2, "runs-2": -2, "webhooks": 2, "maintenance": -2, "beat": 2}
# The limits are shorter than the clock errors, and longer than the test or any pause of a busy machine.
LIMITS = {"RUN_LEASE_SECONDS": "15", "WAITPOINT_EXPIRY_SECONDS": "3600", "RUN_TIMEOUT_SECONDS": "1800", "TZ": "UTC"}


def library() -> Path:
    for pattern in ("lib/*/faketime", "lib/faketime", "lib64/faketime", "local/lib/faketime"):
        for found in sorted(Path("/usr").glob(f"{pattern}/libfaketimeMT.so.1")):
            return found
    pytest.fail(MISSING)


@pytest.fixture
def load() -> Iterator[Load]:
    # Only the wall clock is wrong. The monotonic clock is correct, as on real machines.
    faked = {"LD_PRELOAD": str(library()), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    clocks = {name: faked | {"FAKETIME": f"{hours:+d}h"} for name, hours in HOURS.items()}
    with at_work(environment=QUICK | LIMITS, process_environment=clocks) as load:
        yield load


def test_wrong_clocks_change_nothing(load: Load) -> None:
    with load.going(7, seconds=3):
        pass
    load.settle()
    load.nobody_answers()
    asked = load.start(QUESTION)
    run = load.driver.wait(asked, "waiting")
    # Every sweep runs several times in this period.
    time.sleep(2)
    assert load.driver.get(asked)["status"] == "waiting"
    load.respond(run["pendingWaitpoint"])
    load.check()
    assert load.sql("SELECT max(lease_losses) FROM runs_run") == [(0,)]
    (stamps,) = load.sql("SELECT max(abs(extract(epoch FROM created_at - now()))) FROM runs_runevent")
    assert stamps[0] < 600
    for name, hours in HOURS.items():
        if name == "beat":  # beat logs nothing without errors
            continue
        assert abs(clock_of(load, name) - hours) < 0.5, f"the clock of {name} was not wrong"


def clock_of(load: Load, name: str) -> float:
    """How many hours the clock of the process is ahead, according to its first log line."""
    log = load.stack.processes[name].log
    first = datetime.fromisoformat(next(re.finditer(r'^{"time": "([^"]+)"', log.read_text(), re.M))[1])
    return (first.timestamp() - time.time()) / 3600
