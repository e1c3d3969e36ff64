"""The weekly partitions of stream events on PostgreSQL: where events are, what pruning drops, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from config.kernel import clock
from config.queue import jobs
from runs import events
from runs.models import Run, RunEvent
from runs.streams.prune import EVENTS, prune
from tests.streams.conftest import append, finish, parse
from tests.threads import side_by_side

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite's tables have no partitions"),
]


@pytest.fixture(autouse=True)
def errors(settings, monkeypatch) -> list[str]:
    """The jobs that failed."""
    settings.RUN_EVENT_RETENTION_DAYS = 28
    failed: list[str] = []
    monkeypatch.setattr(jobs.failures, "inc", failed.append)
    monkeypatch.setattr(jobs.rows_failed, "inc", failed.append)
    return failed


@pytest.fixture
def weeks_later(monkeypatch) -> Callable[[int], None]:
    now = clock.now

    def move(weeks: int) -> None:
        monkeypatch.setattr(clock, "now", lambda: now() + timedelta(weeks=weeks))

    return move


@pytest.fixture(autouse=True)
def this_week(weeks_later) -> Iterator[None]:
    """Every test begins and ends with the partitions of this week and the next three."""
    assert EVENTS.create_ahead(clock.now()) == 0
    usual = EVENTS.weeks()
    yield
    weeks_later(0)
    RunEvent.objects.all().delete()
    for week in {*EVENTS.weeks()} - {*usual}:
        EVENTS.drop(week)
    EVENTS.create_ahead(clock.now())
    assert EVENTS.weeks() == usual


@pytest.fixture
def make_old(make_run, user, weeks_later) -> Callable[..., Run]:
    """Makes a run ``weeks`` ago, in a partition of that week, and ends it at once unless it is ``live``."""

    def make(weeks: int, live: bool = False) -> Run:
        weeks_later(-weeks)
        EVENTS.create_ahead(clock.now())
        run: Run = make_run(user)
        if not live:
            finish(run, "Hello")
        weeks_later(0)
        return run

    return make


@pytest.fixture
def indexes(session) -> Callable[[Run], list[int]]:
    """The indexes of the events that a stream of the run sends."""
    return lambda run: [index for index, *_ in parse(b"".join(session.get(f"/api/v1/runs/{run.pk}/stream")))]


def runs_with_events() -> set[str]:
    return set(RunEvent.objects.values_list("run_id", flat=True))


def places() -> dict[str, str]:
    """The partition of each run's events."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT run_id, min(tableoid::regclass::text) FROM runs_runevent GROUP BY run_id")
        return dict(cursor.fetchall())


def deletes(queries: CaptureQueriesContext) -> list[str]:
    return [query["sql"] for query in queries if query["sql"].startswith("DELETE")]


def test_events_of_all_weeks_are_streamed(indexes, make_old, make_run, user):
    before_all = make_run(user, days=200)
    finish(before_all, "x")
    runs = [before_all, make_old(9), make_old(2), make_old(0)]
    assert len(set(places().values())) == len(runs)
    assert places()[before_all.pk] == "runs_runevent_default"
    for run in runs:
        assert indexes(run) == list(range(1, run.last_stream_index + 1))


def test_a_week_whose_runs_ended_long_ago_is_dropped(make_old, make_run, user, errors):
    old, young = [make_old(5), make_old(6)], make_old(4, live=True)
    weeks = len(EVENTS.weeks())
    with CaptureQueriesContext(connection) as queries:
        prune()
    assert runs_with_events() == {young.pk}
    assert len(EVENTS.weeks()) == weeks - 2
    assert not deletes(queries)
    assert Run.objects.filter(pk__in=[run.pk for run in old]).count() == 2
    assert not errors


def test_a_week_waits_a_week_for_its_last_runs(make_old, weeks_later):
    ended, live, late = make_old(5), make_old(5, live=True), make_old(5)
    Run.objects.filter(pk=late.pk).update(finished_at=clock.now() - timedelta(days=27))
    assert prune() == 0
    assert runs_with_events() == {ended.pk, live.pk, late.pk}
    weeks_later(1)
    assert prune() == 2
    assert runs_with_events() == {live.pk}
    finish(live, "at last")
    prune()
    assert runs_with_events() == {live.pk}
    weeks_later(6)
    prune()
    assert not runs_with_events()
    assert min(EVENTS.weeks()) > clock.now() - timedelta(weeks=6)


def test_partitions_are_created_ahead(weeks_later):
    usual = EVENTS.weeks()
    assert usual[0] <= clock.now() < usual[1]
    weeks_later(1)
    prune()
    assert EVENTS.weeks() == [*usual, usual[-1] + timedelta(weeks=1)]


def test_events_are_kept_while_no_partition_is_created(indexes, make_run, user, weeks_later):
    weeks_later(20)
    run = make_run(user)
    append(run, events.message_delta("x"))
    assert places() == {run.pk: "runs_runevent_default"}
    prune()
    # This week stays in the default partition, and the next weeks have partitions.
    assert [week > clock.now() for week in EVENTS.weeks()[-3:]] == [True] * 3
    finish(run, "Hello")
    assert places() == {run.pk: "runs_runevent_default"}
    weeks_later(0)
    assert indexes(run) == list(range(1, run.last_stream_index + 1))
    weeks_later(21)
    next_week = make_run(user)
    append(next_week, events.message_delta("x"))
    assert places()[next_week.pk] != "runs_runevent_default"
    weeks_later(25)
    assert prune() == 1
    assert runs_with_events() == {next_week.pk}


def test_two_jobs_create_and_drop_at_the_same_moment(make_old, weeks_later, errors):
    for weeks in (5, 6, 7):
        make_old(weeks)
    usual = EVENTS.weeks()[-4:]
    weeks_later(2)
    side_by_side(3, lambda _: prune())
    prune()  # a job that waited too long for another leaves the rest to the next
    assert EVENTS.weeks()[-6:] == [*usual, *(usual[-1] + timedelta(weeks=number) for number in (1, 2))]
    assert not runs_with_events()
    assert not errors


def unlimited() -> None:
    """This connection waits for locks without an end of its own."""
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = 0")


@pytest.mark.parametrize("lock", ["SELECT FROM runs_runevent", "LOCK TABLE runs_run IN ROW EXCLUSIVE MODE"])
def test_an_open_transaction_puts_the_job_off(make_old, weeks_later, errors, settings, lock):
    """Requests that wait behind the job wait no longer than it does."""
    settings.HOUSEKEEPING_LOCK_SECONDS = 0.05
    make_old(6)
    weeks = EVENTS.weeks()
    weeks_later(1)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(lock)
        side_by_side(1, lambda _: (unlimited(), prune()))
        assert max(EVENTS.weeks()) == max(weeks)
    prune()
    assert max(EVENTS.weeks()) == max(weeks) + timedelta(weeks=1)
    assert not runs_with_events()
    assert not errors
