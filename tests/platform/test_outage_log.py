"""An outage of the database is one line with its reason, and one when it is over, however often a step fails."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psycopg
import pytest
from django.db import OperationalError
from django.utils import timezone

from config.api import probes
from config.database import retry
from config.database.retry import Outage, persist, reason
from config.kernel import clock
from config.queue import jobs
from tests import factories
from tests.driver import until
from tests.webhooks.conftest import record
from tests.webhooks.receiver import receiving
from webhooks import claims, dispatcher

REFUSED = 'connection to server at "db.example.com", port 5432 failed: Connection refused\n\tIs the server running?'


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Each module has the outage of a new process, and its clock can be moved. ``time.sleep`` moves it too."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: ahead[0], sleep=lambda seconds: move(seconds))

    def move(seconds: float) -> None:
        ahead[0] += seconds

    monkeypatch.setattr(retry, "time", clock)
    outage = Outage()
    for module in (retry, jobs, dispatcher, probes):
        monkeypatch.setattr(module, "outage", outage)
    return move


class Database:
    """What fails while the database is away."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self, *arguments: object) -> int:
        self.left -= 1
        if self.left >= 0:
            raise OperationalError(REFUSED)
        return 0


def require_two_lines(records: list[logging.LogRecord]) -> None:
    lines = [record.getMessage() for record in records if "database is" in record.getMessage()]
    assert [line.partition(" (")[0].partition(" after")[0] for line in lines] == [
        "the database is not available",
        "the database is available again",
    ]
    assert "Connection refused" in lines[0]
    assert not [record for record in records if record.exc_info or record.levelno > logging.WARNING]


def test_a_job_logs_an_outage_once(later, caplog, monkeypatch):
    monkeypatch.setattr(clock, "now", timezone.now)  # the database is away
    database = Database(20)
    for _ in range(24):
        assert jobs.run("test-job", database) == 0
        later(2)
    require_two_lines(caplog.records)


@pytest.mark.django_db(transaction=True)
def test_the_dispatcher_logs_an_outage_once(later, caplog, monkeypatch, user):
    """The outage ends after a time without failures, although no message arrives."""
    database, take_ready = Database(20), claims.take_ready
    monkeypatch.setattr(claims, "take_ready", lambda *arguments: database() or take_ready(*arguments))
    monkeypatch.setattr(dispatcher, "time", retry.time)
    with receiving() as receiver:
        factories.EndpointFactory(user=user, url=receiver.url)
        delivery = record(user)
        one = dispatcher.Dispatcher()
        one.wake()
        until(lambda: "available again" in caplog.text)
        one.stop()
    delivery.refresh_from_db()
    assert delivery.status == "DELIVERED"
    require_two_lines(caplog.records)


def test_a_probe_logs_an_outage_once(later, caplog, monkeypatch):
    probe = probes.Probe("database", Database(20))
    for _ in range(20):
        probe.start().result(30)
        later(2)
    later(5)
    probes.outage.ended()
    require_two_lines(caplog.records)


def test_a_step_waits_for_the_end_of_an_outage(later, caplog, monkeypatch):
    monkeypatch.setattr(retry, "WAIT_SECONDS", 0)
    with ThreadPoolExecutor(1) as threads:
        assert asyncio.run(persist(threads, Database(20))) == 0
    later(5)
    retry.outage.ended()
    require_two_lines(caplog.records)


def test_the_reason_quotes_no_value_of_a_statement():
    error = OperationalError("row (secret) is locked")
    error.__cause__ = psycopg.errors.LockNotAvailable("row (secret) is locked")
    assert reason(error) == "LockNotAvailable"
    assert reason(OperationalError(REFUSED)) == REFUSED.partition("\n")[0]
