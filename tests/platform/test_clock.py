"""The service's clock: the database's time, which no event loop asks for and an outage does not stop."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from config.kernel import clock
from tests.threads import side_by_side

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite's clock is the machine's"),
]


class Database:
    """Counts the queries of this thread, and refuses them while it is ``away``."""

    def __init__(self) -> None:
        self.asked, self.away = 0, False

    def __call__(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        self.asked += 1
        if self.away:
            raise OperationalError("server closed the connection unexpectedly")
        return execute(*arguments)


@pytest.fixture
def database() -> Iterator[Database]:
    clock.sync()
    database = Database()
    with connection.execute_wrapper(database):
        yield database
    clock.sync()


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Moves the steady clock of this process."""
    steady, ahead = clock.steady, [0.0]
    monkeypatch.setattr(clock, "steady", lambda: steady() + ahead[0])
    return lambda seconds: ahead.__setitem__(0, ahead[0] + seconds)


async def now_on_a_loop() -> Any:
    return clock.now()


def test_the_database_is_asked_at_intervals(database, later):
    clock.now()
    assert database.asked == 0
    later(clock.DATABASE_CLOCK_SECONDS)
    before = clock.now()
    assert clock.now() >= before
    assert database.asked == 1


def test_an_event_loop_never_asks_the_database(database, later):
    begun = clock.now()
    later(3600)
    moment = asyncio.run(now_on_a_loop())
    assert timedelta(hours=1) <= moment - begun < timedelta(hours=1, minutes=1)
    assert database.asked == 0


def test_an_event_loop_does_not_ask_before_the_first_answer(database, monkeypatch):
    right = clock.now()
    monkeypatch.setattr(clock, "_synced", None)
    assert abs(asyncio.run(now_on_a_loop()) - right) < timedelta(minutes=1)
    assert database.asked == 0


def test_the_time_continues_while_the_database_is_away(database, later):
    begun = clock.now()
    database.away = True
    later(3600)
    for _ in range(10):
        assert timedelta(hours=1) <= clock.now() - begun < timedelta(hours=1, minutes=1)
    assert database.asked == 1
    later(clock.RETRY_SECONDS)
    clock.now()
    assert database.asked == 2
    database.away = False
    later(clock.RETRY_SECONDS)
    assert clock.now() - begun < timedelta(minutes=1), "the database's own time was not taken"


def test_threads_ask_together_once(later, monkeypatch):
    clock.sync()
    asked: list[None] = []
    sync = clock.sync

    def ask() -> Any:
        asked.append(None)
        return sync()

    monkeypatch.setattr(clock, "sync", ask)
    later(clock.DATABASE_CLOCK_SECONDS)
    side_by_side(8, lambda _: clock.now())
    assert len(asked) == 1


def test_a_late_answer_is_not_taken(database, later):
    """The process was suspended between the answer of the database and its use."""
    begun = clock.now()

    def answer_late(execute: Callable[..., Any], *arguments: Any) -> Any:
        answer = execute(*arguments)
        later(20)
        return answer

    with connection.execute_wrapper(answer_late):
        clock.sync()
    assert timedelta(seconds=20) <= clock.now() - begun < timedelta(seconds=40)
