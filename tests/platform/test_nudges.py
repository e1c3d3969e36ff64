"""Nudges: a separate thread publishes them in groups, so the caller never waits for the broker."""

import threading
from typing import Any

import pytest
from django.db import transaction

from config.queue import publisher
from config.queue.publisher import Source
from config.telemetry import logs

# The original function. A fixture of all tests replaces it.
NUDGE = publisher.nudge


class FakeBroker:
    """Records the calls of ``send_task``. The calls block while ``gate`` is cleared, as with a stalled broker."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[str, ...], float | None]] = []
        self.request_ids: list[str] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def send_task(self, task: str, *, args: tuple[str, ...], countdown: float | None, **options: Any) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if self.failure:
            raise self.failure
        self.sent.append((task, tuple(args), countdown))
        self.request_ids.append(logs.request_id.get())


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    request.getfixturevalue(
        "nudges"
    )  # this fixture replaces ``nudge``, so it must run before the original is set again
    fake = FakeBroker()
    monkeypatch.setattr(publisher, "nudge", NUDGE)
    monkeypatch.setattr("config.celery.app", fake)
    source = Source(publisher.send_nudges, publisher.GATHER_SECONDS_PER_NUDGE, publisher.nudges_failed)
    monkeypatch.setattr(publisher, "nudges", source)
    return fake


def flush() -> None:
    assert publisher.nudges.flush(30)


def while_stalled(fake: FakeBroker, *asked: tuple[Any, ...]) -> None:
    """Nudge for each of ``asked`` while the broker blocks a nudge for the task ``first``."""
    fake.gate.clear()
    publisher.nudge("first")
    assert fake.entered.wait(30)
    for task, *ids in asked:
        publisher.nudge(task, *ids)
    fake.gate.set()
    flush()
    assert fake.sent.pop(0) == ("first", (), None)


def test_an_idle_publisher_sends_each_nudge_separately(fake):
    for name in ("run_a", "run_b"):
        publisher.nudge("runs.execute_run", name)
        flush()
    assert fake.sent == [("runs.execute_run", ("run_a",), None), ("runs.execute_run", ("run_b",), None)]


def test_nudges_during_a_stall_do_not_block_and_are_sent_together(fake):
    execute = "runs.execute_run"
    while_stalled(fake, (execute, "a"), ("deliver",), (execute, "b"), (execute, "a"), ("deliver",))
    assert fake.sent == [(execute, ("a", "b"), None), ("deliver", (), None)]


def test_many_nudges_are_split_into_several_messages(fake):
    names = [f"run_{number}" for number in range(20)]
    while_stalled(fake, *(("execute", name) for name in names))
    assert [len(ids) for _, ids, _ in fake.sent] == [8, 8, 4]
    assert [name for _, ids, _ in fake.sent for name in ids] == names


def test_the_wait_grows_with_the_number_of_nudges_that_arrive(fake):
    publisher.nudge("execute", "run")
    flush()
    assert publisher.nudges.interval_seconds == publisher.GATHER_SECONDS_PER_NUDGE
    fake.sent.clear()
    while_stalled(fake, *(("execute", f"run_{number}") for number in range(50)))
    assert publisher.nudges.interval_seconds == publisher.GATHER_SECONDS


def test_nudges_with_different_countdowns_are_not_joined(fake):
    for countdown in (30.1, 90.1, 30.1, 90.1):
        publisher.nudge("retry", countdown=countdown)
    flush()
    assert {countdown for _, _, countdown in fake.sent} == {30.1, 90.1}


def test_the_request_id_is_sent_with_the_nudge(fake):
    logs.request_id.set("req-1")
    publisher.nudge("execute", "run_a")
    logs.request_id.set("req-2")
    flush()
    assert fake.request_ids == ["req-1"]


def test_publishing_pauses_after_a_failure(fake, caplog):
    fake.failure = ConnectionError("redis://:secret@broker")
    publisher.nudge("execute", "run_a")
    flush()
    fake.failure = None
    publisher.nudge("execute", "run_b")
    flush()
    assert fake.sent == []
    assert "ConnectionError" in caplog.text
    assert "secret" not in caplog.text
    publisher.nudges.paused_until = 0.0
    publisher.nudge("execute", "run_c")
    flush()
    assert fake.sent == [("execute", ("run_c",), None)]


@pytest.mark.django_db(transaction=True)
def test_nudges_are_sent_only_after_a_commit(fake):
    with transaction.atomic():
        publisher.nudge_after_commit("execute", "run_a")
        flush()
        assert fake.sent == []
    with transaction.atomic():
        publisher.nudge_after_commit("execute", "run_b")
        transaction.set_rollback(True)
    flush()
    assert fake.sent == [("execute", ("run_a",), None)]
