"""The heartbeat of a worker waits longer while the database is away, and logs it once."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError

from config.database.retry import Outage
from runs.engine import heartbeat as heartbeats
from runs.engine.heartbeat import BEATS_PER_LEASE, RUN_CANCEL_POLL_SECONDS, Heartbeat
from runs.engine.process import Process

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_heartbeat_waits_longer_while_the_database_is_away(settings, monkeypatch, caplog):
    waits: list[float] = []
    failures = 12

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) > failures + 2

    def beat(heartbeat: Heartbeat) -> None:
        if len(waits) <= failures:
            raise OperationalError("connection refused")

    monkeypatch.setattr(Heartbeat, "_beat", beat)
    monkeypatch.setattr(heartbeats, "outage", Outage())
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    heartbeat = Heartbeat(Process(), [], offer=nothing, cancel=nothing, drop_all=nothing)
    heartbeat.stopped = Stopped()
    heartbeat.run()
    longest = settings.RUN_LEASE_SECONDS / BEATS_PER_LEASE
    assert waits[0] == RUN_CANCEL_POLL_SECONDS
    assert max(waits) <= longest
    assert min(waits[6 : failures + 1]) >= longest / 2
    assert waits[failures + 1] == RUN_CANCEL_POLL_SECONDS, "after a success it waits no longer"
    assert len([record for record in caplog.records if "the database is not available" in record.message]) == 1
