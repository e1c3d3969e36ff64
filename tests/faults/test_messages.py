"""Messages that arrive repeatedly, late or never, and a beat that runs twice or not at all."""

import time
from collections.abc import Iterator

import pytest
import redis

from tests.faults.load import Load, at_work
from tests.stack.stack import CELERY

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work() as load:
        yield load


def test_repeated_messages_change_nothing(load: Load) -> None:
    """Repeated messages reach both workers at once and later: while a run executes, waits and has ended."""
    broker = load.broker()

    def again(run_id: str) -> None:
        for countdown in (0, 0, 1, 3):
            broker.send_task("runs.execute_run", args=[run_id], queue="runs", countdown=countdown)
        broker.send_task("webhooks.deliver_due", queue="webhooks")

    load.started.append(again)
    try:
        with load.going(7, seconds=3):
            pass
        load.check()
    finally:
        load.started.clear()
    before = load.footprint()
    for run_id in load.runs:
        again(run_id)
    with redis.Redis.from_url(load.stack.environment["REDIS_URL"]) as client:
        load.stack.wait_for(lambda: not client.llen("runs") and not client.hlen("unacked"), what="empty queues")
    assert load.footprint() == before


def test_a_second_beat_changes_nothing(load: Load) -> None:
    schedule = load.stack.directory / "second-schedule"
    load.stack.add("beat-2", [*CELERY, "beat", "-s", str(schedule), "--pidfile="])
    try:
        with load.going(7, seconds=3):
            pass
        load.check()
    finally:
        load.stack.processes.pop("beat-2").kill()


def test_runs_complete_without_beat_and_messages(load: Load) -> None:
    """The sweeps of the workers find runs. The jobs of beat are done when beat runs again."""
    load.stack.kill("beat")
    with redis.Redis.from_url(load.stack.environment["REDIS_URL"]) as client, load.going(7, seconds=4):
        for _ in range(16):
            client.flushdb()
            time.sleep(0.25)
    load.stack.restart("beat")
    load.check()
