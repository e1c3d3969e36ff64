"""Messages that come twice, late or not at all, and a beat that runs twice or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from tests.faults.load import APPROVAL, QUESTION, Load, at_work
from tests.stack.stack import CELERY

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work() as load:
        yield load


def test_every_message_comes_three_times(load: Load) -> None:
    """At once and late: to both workers, while the run executes, waits and has ended."""
    broker = load.broker()

    def again(run_id: str) -> None:
        for countdown in (0, 0, 1, 3):
            broker.send_task("runs.execute_run", args=[run_id], queue="runs", countdown=countdown)
        broker.send_task("webhooks.deliver_due", queue="webhooks")

    load.started.append(again)
    try:
        with load.going(21, seconds=5):
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


def test_beat_runs_twice(load: Load) -> None:
    schedule = load.stack.directory / "second-schedule"
    load.stack.add("beat-2", [*CELERY, "beat", "-s", str(schedule), "--pidfile="])
    try:
        with load.going(21, seconds=5):
            pass
        load.check()
    finally:
        load.stack.processes.pop("beat-2").kill()


def test_beat_is_away_and_messages_are_lost(load: Load) -> None:
    """The workers' own looks find runs; what only beat finds is done when it is back."""
    load.stack.kill("beat")
    with redis.Redis.from_url(load.stack.environment["REDIS_URL"]) as client, load.going(21, seconds=6):
        for _ in range(24):
            client.flushdb()
            time.sleep(0.25)
    load.stack.restart("beat")
    load.check()


def test_a_question_expires_once_beat_is_back(load: Load) -> None:
    load.nobody_answers()
    load.stack.kill("beat")
    runs = load.start_all(APPROVAL, QUESTION)
    for run in runs:
        load.driver.wait(run, "waiting")
    load.sql("UPDATE runs_waitpoint SET expires_at = now() WHERE status = 'PENDING' RETURNING 1")
    time.sleep(1)
    assert {load.driver.get(run)["status"] for run in runs} == {"waiting"}
    load.stack.restart("beat")
    ended = [load.driver.wait(run) for run in runs]
    assert {(run["status"], run["errorCode"]) for run in ended} == {("failed", "WAITPOINT_EXPIRED")}
    load.stack.manage("check_invariants")
