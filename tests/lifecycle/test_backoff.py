"""The heartbeat of a worker waits longer while the database is away, and logs it once."""

import threading

import pytest
from django.db import OperationalError

from config.database.retry import Outage
from runs.engine import engine as engines
from runs.engine.engine import BEATS_PER_LEASE, RUN_CANCEL_POLL_SECONDS, Engine, Heartbeat

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
    monkeypatch.setattr(engines, "outage", Outage())
    heartbeat = Engine().heartbeat
    heartbeat.stopped = Stopped()
    heartbeat.run()
    longest = settings.RUN_LEASE_SECONDS / BEATS_PER_LEASE
    assert waits[0] == RUN_CANCEL_POLL_SECONDS
    assert max(waits) <= longest
    assert min(waits[6 : failures + 1]) >= longest / 2
    assert waits[failures + 1] == RUN_CANCEL_POLL_SECONDS, "after a success it waits no longer"
    assert len([record for record in caplog.records if "the database is not available" in record.message]) == 1
