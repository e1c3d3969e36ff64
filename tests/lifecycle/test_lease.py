"""A worker that was suspended past its lease begins no call, and disturbs nobody who took over its runs."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError, connection, transaction

from config.kernel import clock
from runs import catalogue, lifecycle
from runs.engine.engine import Engine
from runs.lifecycle import sweeps
from runs.llm.demo import DemoModel
from runs.models import Run, Tool, Worker
from tests.driver import until
from tests.tiers import slow
from tests.webhooks.receiver import answer, receiving

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_lease_is_measured_with_a_clock_that_counts_a_suspended_machine(monkeypatch):
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 7.0}.__getitem__)
    assert clock.steady() == 7.0


@transaction.atomic
def lose_lease(engine: Engine) -> None:
    """Another process finds that the engine's lease has expired."""
    worker = Worker.objects.select_for_update().get(pk=engine.process.worker_id)
    Worker.objects.filter(pk=worker.pk).update(expires_at=worker.expires_at - timedelta(hours=1))
    assert lifecycle.reap_workers() == 1


@pytest.mark.slow
def test_a_late_write_of_text_does_not_interrupt_the_next_owner(bench, monkeypatch):
    """The same process claims the run again while the text of the lost lease still waits for the database."""
    append, held, release = lifecycle.append_text, threading.Event(), threading.Event()

    def hold_first(batch: Any) -> Any:
        if not held.is_set():
            held.set()
            assert release.wait(30)
        return append(batch)

    monkeypatch.setattr(lifecycle, "append_text", hold_first)
    run = bench.start("/stream 40 50\n/say the end")
    assert held.wait(30)
    process = bench.engine.process
    lost = process.worker_id
    lose_lease(bench.engine)
    # Until it notices the loss, it may claim the run under the lost lease, too, which is another loss.
    until(lambda: lost != process.worker_id == Run.objects.get().worker_id)
    losses = Run.objects.get().lease_losses
    release.set()
    assert bench.wait(run["id"])["status"] == "completed"
    assert Run.objects.get().lease_losses == losses


def test_a_look_before_a_suspension_takes_no_runs_after_it(settings, monkeypatch):
    """All processes come back together: what the sweep saw before says nothing about the worker."""
    settings.RUN_LEASE_SECONDS, settings.RUN_SWEEP_SECONDS = 5, 1
    seconds = 1e9
    monkeypatch.setattr(clock, "steady", lambda: seconds)
    worker = Worker.objects.create(host="h", pid=1, expires_at=clock.now() - timedelta(minutes=1))

    def is_lost(after: float) -> bool:
        nonlocal seconds
        seconds += after
        lifecycle.sweep()
        return not Worker.objects.filter(pk=worker.pk).exists()

    assert not is_lost(0)
    assert not is_lost(40)
    assert not is_lost(4)
    assert is_lost(4)


@pytest.mark.parametrize("point", ["before_model", *slow("after_dispatch")])
def test_after_a_suspension_nothing_begins_without_the_lease(bench, monkeypatch, point):
    """The machine is suspended just before a call, and another worker takes its runs over."""
    suspended: list[str] = []
    steady = clock.steady if hasattr(clock, "steady") else time.monotonic
    monkeypatch.setattr(clock, "steady", lambda: steady() + 3600 * len(suspended), raising=False)
    asked: list[int] = []
    stream = DemoModel.stream

    def count(self: DemoModel, request: Any) -> Any:
        asked.append(request.turn_index)
        return stream(self, request)

    monkeypatch.setattr(DemoModel, "stream", count)

    def reap() -> None:
        lose_lease(bench.engine)
        connection.close()

    def crash_point(name: str) -> None:
        if name == point and not suspended:
            other = threading.Thread(target=reap)
            other.start()
            other.join()
            # Last: the heartbeat, which is then late, must not renew the lease before it is lost.
            suspended.append(name)

    monkeypatch.setattr(lifecycle, "crash_point", crash_point)
    with receiving(answer(200, b'{"result": "ok"}')) as receiver:
        columns = {"approval": "never", "price": 1000, "input_schema": {"type": "object"}}
        Tool.objects.create(name="book", display_name="x", node_type="http", url=receiver.url, **columns)
        until(lambda: "book" in catalogue.remembered().tools)
        run = bench.finish("/call book {}\n/say done")
        begun = len(receiver.requests)
    assert suspended == [point]
    assert (run["status"], Run.objects.get().lease_losses) == ("completed", 1)
    (call,) = run["toolInvocations"]
    if point == "before_model":
        assert (asked, begun, call["status"]) == ([1, 2], 1, "COMPLETED")
    else:
        assert (asked, begun, call["errorCode"]) == ([1, 2], 0, "OUTCOME_UNKNOWN")
    assert lifecycle.violations() == []


@pytest.fixture
def suspend(monkeypatch) -> Callable[[float], None]:
    """Let the steady clock of this process go on by so many seconds."""
    steady, ahead = clock.steady, [0.0]
    monkeypatch.setattr(clock, "steady", lambda: steady() + ahead[0])
    return lambda seconds: ahead.__setitem__(0, ahead[0] + seconds)


@pytest.fixture
def late(monkeypatch) -> Worker:
    monkeypatch.setattr(sweeps, "_watched", (0.0, float("-inf")))
    return Worker.objects.create(host="x", pid=1, expires_at=clock.now() - timedelta(minutes=1))


def test_a_worker_that_was_suspended_between_its_beat_and_its_look_reaps_nobody(late):
    heartbeat = Engine().heartbeat
    heartbeat.process.lease_until = clock.steady()
    heartbeat._reap()
    assert Worker.objects.filter(pk=late.pk).exists()
    heartbeat.process.lease_until = clock.steady() + 60
    heartbeat._reap()
    assert not Worker.objects.filter(pk=late.pk).exists()


@pytest.mark.parametrize("failing", ["config.kernel.clock.now", "runs.models.Worker.save"])
def test_a_worker_that_starts_in_an_outage_gives_late_workers_the_time_of_a_lease(late, failing, suspend, settings):
    heartbeat = Engine().heartbeat
    with mock.patch(failing, side_effect=OperationalError("connection refused")), pytest.raises(OperationalError):
        heartbeat.register()
    heartbeat.register()
    heartbeat._reap()
    assert Worker.objects.filter(pk=late.pk).exists()
    suspend(settings.RUN_LEASE_SECONDS)
    heartbeat.process.lease_until = clock.steady() + 60
    heartbeat._reap()
    assert not Worker.objects.filter(pk=late.pk).exists()


def test_a_sweep_without_a_lease_gives_late_workers_the_time_of_another(late, settings, suspend):
    for seconds in (0, settings.RUN_LEASE_SECONDS * 0.6):
        suspend(seconds)
        assert sweeps.reap_late_workers() == 0
    suspend(settings.RUN_LEASE_SECONDS * 0.6)
    assert sweeps.reap_late_workers() == 1


@pytest.mark.parametrize("when", ["between two sweeps", "in the first sweep"])
def test_a_sweep_that_was_suspended_gives_late_workers_that_time_again(late, settings, suspend, monkeypatch, when):
    long = settings.RUN_LEASE_SECONDS * 4
    if when == "in the first sweep":
        now = clock.now
        with monkeypatch.context() as patch:
            patch.setattr(clock, "now", lambda: suspend(long) or now())
            assert sweeps.reap_late_workers() == 0
    else:
        assert sweeps.reap_late_workers() == 0
        suspend(long)
    assert sweeps.reap_late_workers() == 0


def test_a_lease_shorter_than_the_look_for_cancels_is_renewed(engines, settings, monkeypatch):
    settings.RUN_LEASE_SECONDS = 5
    monkeypatch.setattr("runs.engine.engine.RUN_CANCEL_POLL_SECONDS", 600)
    engines()
    first = Worker.objects.get().expires_at
    until(lambda: Worker.objects.get().expires_at > first)
