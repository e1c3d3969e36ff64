"""Fixtures that run an engine in the test process, with real transactions and threads and without a broker."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.models import F
from rest_framework.test import APIClient

from config.queue import publisher
from runs import catalogue, lifecycle
from runs.apps import RESUME_PAID
from runs.engine.engine import Engine
from runs.engine.session import Interruption
from runs.models import Run, RunEvent, Worker
from tests.driver import FINAL, Driver, InProcess, until


class Bench(Driver):
    """A user's client and the engine that executes the runs."""

    def __init__(self, client: APIClient, engine: Engine) -> None:
        super().__init__(InProcess(client))
        self.client, self.engine = client, engine

    def wait(self, run_id: str, *statuses: str, timeout: float = 60) -> dict[str, Any]:
        """A look reads the row: a request would take ten times the time, which the engine in this process needs."""
        row = Run.objects.filter(pk=run_id, status__in=statuses or FINAL)
        until(row.exists, timeout, lambda: self.get(run_id))
        return super().wait(run_id, *statuses, timeout=timeout)


@pytest.fixture
def engines(transactional_db, monkeypatch, settings) -> Iterator[Callable[[], Engine]]:
    """Make engines. The last engine receives every published nudge."""
    # A sweep and a beat cost as much as a short run.
    settings.RUN_SWEEP_SECONDS = 1
    monkeypatch.setattr("runs.engine.engine.RUN_CANCEL_POLL_SECONDS", 0.05)
    monkeypatch.setattr("runs.engine.contacts.LOOK_SECONDS", 0.05)
    # On a busy machine, no lease may end that the test does not end, and such an end is noticed at the next beat.
    settings.RUN_LEASE_SECONDS = 60
    monkeypatch.setattr("runs.engine.engine.BEATS_PER_LEASE", 60)
    for module in ("calls", "line", "runs", "sweeps", "waitpoints"):
        monkeypatch.setattr(f"runs.lifecycle.{module}.NUDGE_GRACE", timedelta(seconds=0.5))
    catalogue.refresh()
    made: list[Engine] = []
    opened: list[BaseDatabaseWrapper] = []

    def remember(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            connection.inc_thread_sharing()
            opened.append(connection)

    def make() -> Engine:
        engine = Engine()
        engine.start()
        made.append(engine)
        return engine

    def nudge(task: str, *args: Any, countdown: float | None = None) -> None:
        if task == "runs.execute_run" and made:
            for run_id in args:
                made[-1].offer(run_id)
        elif task == RESUME_PAID:
            for user_id in args:
                lifecycle.resume_paid(int(user_id))

    monkeypatch.setattr(publisher, "nudge", nudge)
    connection_created.connect(remember)
    yield make
    for engine in made:
        if not engine.heartbeat.stopped.is_set():
            engine.stop(0)
    for thread in threading.enumerate():
        if thread.name.startswith(("run-loop", "run-heartbeat", "run-places")):
            thread.join(10)  # on a busy machine it ends a moment later
            assert not thread.is_alive(), "an engine outlived its test"
    connection_created.disconnect(remember)
    # The threads of an engine outlive the test. Their open connections would keep the test database from being dropped.
    for connection in opened:
        connection.close()


def vanish(engine: Engine) -> None:
    """Simulate ``kill -9`` of the engine's process: it writes nothing more and hands no run over."""
    engine.heartbeat.stopped.set()
    engine.heartbeat.join()
    engine.loop.call_soon_threadsafe(engine._cancel, list(engine.tasks), Interruption.SHUT_DOWN)
    until(lambda: not engine.tasks)
    engine.loop.call_soon_threadsafe(engine.loop.stop)
    engine.loop_thread.join()
    engine.process.model_places.thread.shutdown(wait=True, cancel_futures=True)
    engine.process.db_threads.shutdown(wait=True, cancel_futures=True)
    engine.process.tool_threads.shutdown()
    engine.process.file_threads.shutdown()
    # Its lease ends now, so that no test waits for it.
    Worker.objects.filter(pk=engine.process.worker_id).update(expires_at=F("expires_at") - timedelta(hours=1))


@pytest.fixture
def bench(engines, session) -> Bench:
    return Bench(session, engines())


@pytest.fixture
def laws(db: None) -> Iterator[None]:
    """After the test, nothing violates an invariant, and the accounts are what the ledger says."""
    yield
    assert lifecycle.violations() == []


@pytest.fixture
def events() -> Callable[[str], list[tuple[str, dict[str, Any]]]]:
    """Return a run's stream events as (type, data), and assert that the indexes have no gap."""

    def read(run_id: str) -> list[tuple[str, dict[str, Any]]]:
        last = Run.objects.values_list("last_stream_index", flat=True).get(pk=run_id)
        rows = list(RunEvent.objects.filter(run_id=run_id).order_by("index"))
        assert [row.index for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) >= last
        return [(row.type, json.loads(row.data)) for row in rows]

    return read


def joined(events: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the message text that a client of the stream assembles."""
    text = ""
    for kind, data in events:
        if kind == "message.reset":
            text = ""
        elif kind == "message.delta":
            text += data["text"]
    return text
