"""A worker resumes after its lease has expired: other workers have taken its runs over, and it changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import APPROVAL, NOT_NEEDED, OUTSIDE, PLAIN, STREAM, TOOLS, Kind, Load, at_work

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]


SLOW = Kind("/wait 6\n/say the end", "the end")


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work(without=NOT_NEEDED) as load:
        yield load


def is_frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# A suspended process cannot withdraw a request that it has already sent to a tool. The runs at each point avoid this
# case: either no call has started, or all have finished.
POINTS = {
    "before_model": (STREAM, TOOLS, OUTSIDE),
    "after_model": (STREAM, TOOLS, OUTSIDE),
    "after_dispatch": (STREAM, OUTSIDE),
    "after_tool": (STREAM, OUTSIDE),
    "mid-stream": (STREAM, TOOLS, APPROVAL),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_stale_worker_writes_charges_and_sends_nothing(load: Load, point: str) -> None:
    stack = load.stack
    stale = stack.processes["runs-1"]
    stack.kill("runs-2")
    environment = {} if point == "mid-stream" else {"CRASH_POINT": f"freeze:{point}"}
    stack.kill("runs-1")
    stack.restart("runs-1", environment=environment)
    runs = load.start_all(*POINTS[point])
    if point == "mid-stream":
        stack.wait_for(lambda: load.driver.get(runs[0])["lastStreamIndex"] > 6, what="streamed text")
        stack.pause("runs-1")
    stack.wait_for(lambda: is_frozen(stale.pid), what="the worker's suspension")
    stale.environment.pop("CRASH_POINT", None)
    stack.processes["runs-2"].start()
    load.settle()
    before = load.footprint()
    stack.resume("runs-1")
    # A run that it completes afterwards proves that it has processed everything it held before.
    stack.kill("runs-2")
    stack.wait_for(lambda: "this worker's lease was lost" in stale.log.read_text(), what="the loss being noticed")
    stack.wait_for(
        lambda: load.sql("SELECT count(*) FROM runs_worker WHERE expires_at > now()")[0][0] == 1, what="its new lease"
    )
    after = load.footprint()
    assert after == before
    fresh = load.start(PLAIN)
    assert load.driver.wait(fresh)["status"] == "completed"
    after = load.footprint()
    assert [row for row in after["runs"] if row[0] != fresh] == before["runs"]
    assert after["tools"] == before["tools"]
    load.check()


def test_a_stale_worker_resumes_while_another_executes_its_run(load: Load) -> None:
    """Only the lease shows the change: the run is still running, and its stream is as the stale worker last saw it."""
    stack = load.stack
    stale, other = stack.processes["runs-1"], stack.processes["runs-2"]
    stack.kill("runs-2")
    stack.kill("runs-1")
    stack.restart("runs-1", environment={"CRASH_POINT": "freeze:after_model"})
    run_id = load.start(SLOW)
    stack.wait_for(lambda: is_frozen(stale.pid), what="the worker's suspension")
    del stale.environment["CRASH_POINT"]
    other.start()
    owner = "SELECT w.pid FROM runs_worker w JOIN runs_run r ON r.worker_id = w.id WHERE r.id = %s"
    stack.wait_for(lambda: load.sql(owner, run_id) == [(other.pid,)], what="the takeover")
    before = load.footprint()
    stack.resume("runs-1")
    stack.wait_for(lambda: "this worker's lease was lost" in stale.log.read_text(), what="the loss being noticed")
    assert load.footprint() == before
    assert load.sql(owner, run_id) == [(other.pid,)]
    load.check()
