"""Workers are killed at each step of a run. Another worker continues from the record, and nothing happens twice."""

from collections.abc import Iterator

import pytest
import requests

from tests.faults.load import APPROVAL, FAILING, NOT_NEEDED, OUTSIDE, PLAIN, QUESTION, STREAM, TOOLS, Load, at_work

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]

# Each test kills several workers, fewer than a run may lose. Each dies while it takes over the runs of the one before.
POINTS = (
    ("before_model", "after_model", "before_dispatch", "after_dispatch"),
    ("before_wait", "committed_waiting", "committed_running", "after_tool"),
    ("committed_failed", "committed_completed"),
)


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work(without=NOT_NEEDED) as load:
        yield load


@pytest.fixture(autouse=True)
def workers_as_they_were(load: Load) -> Iterator[None]:
    yield
    for name in ("runs-1", "runs-2", "web"):
        load.stack.processes[name].environment.pop("CRASH_POINT", None)


def die_at(load: Load, name: str, point: str) -> None:
    """Start the worker with a crash point. Its death does not fail the test."""
    process = load.stack.processes[name]
    process.kill()
    process.environment["CRASH_POINT"] = point
    process.start()
    process.wanted = False


@pytest.mark.parametrize("points", POINTS)
def test_another_worker_continues_after_each_crash_point(load: Load, points: tuple[str, ...]) -> None:
    stack = load.stack
    stack.kill("runs-2")
    die_at(load, "runs-1", points[0])
    load.start_all(PLAIN, TOOLS, OUTSIDE, APPROVAL, STREAM, QUESTION, FAILING)
    stack.wait_for(lambda: not stack.processes["runs-1"].running, 60, f"a worker's death at {points[0]}")
    for point in points[1:]:
        die_at(load, "runs-2", point)
        stack.wait_for(lambda: not stack.processes["runs-2"].running, 60, f"a worker's death at {point}")
    del stack.processes["runs-1"].environment["CRASH_POINT"]
    stack.processes["runs-1"].start()
    load.check()


def test_answers_given_while_every_worker_is_dead_are_used(load: Load) -> None:
    """Users answer while no worker lives. The next worker dies before it dispatches the approved call."""
    stack = load.stack
    stack.restart("runs-2")
    load.nobody_answers()
    runs = load.start_all(APPROVAL, QUESTION)
    asked = [load.driver.wait(run, "waiting") for run in runs]
    stack.kill("runs-1")
    stack.kill("runs-2")
    for run in asked:
        load.respond(run["pendingWaitpoint"])
    die_at(load, "runs-1", "before_dispatch")
    stack.wait_for(lambda: not stack.processes["runs-1"].running, 60, "the worker's death")
    stack.restart("runs-2")
    load.check()


def test_the_web_process_dies_between_the_commit_and_the_message(load: Load) -> None:
    """The caller gets no response, but the run exists and executes. A retry with the same key returns that run."""
    stack = load.stack
    chat = load.driver.chat()
    stack.restart("web", environment={"CRASH_POINT": "committed_queued"})
    send = {"json": {"message": "Hello"}, "headers": {"Idempotency-Key": "once"}}
    with pytest.raises(requests.ConnectionError):
        load.http.post(f"/chats/{chat}/runs", **send)
    del stack.processes["web"].environment["CRASH_POINT"]
    stack.restart("web")
    again = load.http.post(f"/chats/{chat}/runs", **send)
    assert again.status_code == 201, again.text
    (run,) = load.http.get(f"/chats/{chat}/runs").json()["items"]
    assert run["id"] == again.json()["id"]
    load.runs[run["id"]] = PLAIN
    load.check()
