"""Nudges: published by a thread of their own, a few together, and never at the cost of whoever asks."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from django.db import transaction

from config.queue import nudges
from config.queue.publisher import Publisher
from config.telemetry import logs

# As it is before a fixture of all tests replaces it.
NUDGE = nudges.nudge


class FakeBroker:
    """What ``send_task`` was given; with ``gate`` cleared it blocks, as a stalled broker does."""

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
    request.getfixturevalue("nudges")  # which replaces what is put back here
    fake = FakeBroker()
    monkeypatch.setattr(nudges, "nudge", NUDGE)
    monkeypatch.setattr(nudges, "current_app", fake)
    monkeypatch.setattr(nudges, "publisher", Publisher())
    monkeypatch.setattr(nudges, "source", replace(nudges.source))
    return fake


def flush() -> None:
    assert nudges.publisher.flush(30)


def while_stalled(fake: FakeBroker, *asked: tuple[Any, ...]) -> None:
    """Ask for ``asked`` while a first one, of the task ``first``, is on its way."""
    fake.gate.clear()
    nudges.nudge("first")
    assert fake.entered.wait(30)
    for task, *ids in asked:
        nudges.nudge(task, *ids)
    fake.gate.set()
    flush()
    assert fake.sent.pop(0) == ("first", (), None)


def test_an_idle_process_sends_each(fake):
    for name in ("run_a", "run_b"):
        nudges.nudge("runs.execute_run", name)
        flush()
    assert fake.sent == [("runs.execute_run", ("run_a",), None), ("runs.execute_run", ("run_b",), None)]


def test_nobody_waits_for_a_stalled_broker_and_what_gathers_goes_together(fake):
    execute = "runs.execute_run"
    while_stalled(fake, (execute, "a"), ("deliver",), (execute, "b"), (execute, "a"), ("deliver",))
    assert fake.sent == [(execute, ("a", "b"), None), ("deliver", (), None)]


def test_a_burst_is_shared_out(fake):
    names = [f"run_{number}" for number in range(20)]
    while_stalled(fake, *(("execute", name) for name in names))
    assert [len(ids) for _, ids, _ in fake.sent] == [8, 8, 4]
    assert [name for _, ids, _ in fake.sent for name in ids] == names


def test_countdowns_stay_apart(fake):
    for countdown in (30.1, 90.1, 30.1, 90.1):
        nudges.nudge("retry", countdown=countdown)
    flush()
    assert {countdown for _, _, countdown in fake.sent} == {30.1, 90.1}


def test_the_request_s_id_goes_along(fake):
    logs.request_id.set("req-1")
    nudges.nudge("execute", "run_a")
    logs.request_id.set("req-2")
    flush()
    assert fake.request_ids == ["req-1"]


def test_after_a_failure_nothing_is_sent_for_a_while(fake, caplog):
    fake.failure = ConnectionError("redis://:secret@broker")
    nudges.nudge("execute", "run_a")
    flush()
    fake.failure = None
    nudges.nudge("execute", "run_b")
    flush()
    assert fake.sent == []
    assert "ConnectionError" in caplog.text
    assert "secret" not in caplog.text
    nudges.source.paused_until = 0.0
    nudges.nudge("execute", "run_c")
    flush()
    assert fake.sent == [("execute", ("run_c",), None)]


@pytest.mark.django_db(transaction=True)
def test_only_what_is_committed_is_told(fake):
    with transaction.atomic():
        nudges.nudge_after_commit("execute", "run_a")
        flush()
        assert fake.sent == []
    with transaction.atomic():
        nudges.nudge_after_commit("execute", "run_b")
        transaction.set_rollback(True)
    flush()
    assert fake.sent == [("execute", ("run_a",), None)]
