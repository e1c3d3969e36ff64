"""The streamed text of many runs is appended at once, to those that are still their owner's."""

import json
import threading
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from config.kernel import clock
from runs import lifecycle
from runs.models import Run, RunEvent
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

OWNER = "wrk_owner"


def running(**columns: Any) -> Run:
    since = clock.now()
    given = {"status": "running", "worker_id": OWNER, "lease_token": 3, "running_since": since, "last_stream_index": 7}
    return factories.RunFactory(**given | columns)


def texts(run: Run) -> list[tuple[int, str]]:
    """The run's events after those that it was made with."""
    rows = RunEvent.objects.filter(run=run, index__gt=7, type="message.delta").order_by("index")
    return [(index, json.loads(data)["text"]) for index, data in rows.values_list("index", "data")]


def row(run: Run) -> tuple[Any, ...]:
    return Run.objects.values_list("last_stream_index", "unrecorded_text").get(pk=run.pk)


def test_each_run_gets_its_own_text():
    runs = [running(last_stream_index=7 + number) for number in range(3)]
    given = ['"quoted" \\ {NULL}, “\n', "NULL", "," * 100_000]
    written = lifecycle.append_text(list(zip(runs, given, strict=True)))
    for number, run in enumerate(runs):
        assert texts(run) == [(8 + number, given[number])]
        assert row(run) == (8 + number, True)
        assert (written[run.pk].last_stream_index, written[run.pk].unrecorded_text) == row(run)


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"lease_token": 4},
        {"worker_id": "wrk_other"},
        {"worker_id": None},
        {"last_stream_index": 9},
        {"status": "waiting"},
    ],
    ids=str,
)
def test_a_run_that_is_not_as_it_is_known_gets_no_text(meanwhile):
    changed, other = running(), running()
    factories.force_update(Run.objects.filter(pk=changed.pk), **meanwhile)
    before = row(changed)
    assert set(lifecycle.append_text([(changed, "late"), (other, "in time")])) == {other.pk}
    assert (texts(changed), row(changed)) == ([], before)
    assert texts(other) == [(8, "in time")]


def test_text_whose_commit_was_not_confirmed_is_appended_once():
    confirmed, lost, after = running(), running(), running()
    lifecycle.append_text([(lost, "once"), (after, "earlier")])
    written = lifecycle.append_text([(confirmed, "a"), (lost, "once"), (after, "other text")])
    assert [texts(run) for run in (confirmed, lost, after)] == [[(8, "a")], [(8, "once")], [(8, "earlier")]]
    assert {pk: run.last_stream_index for pk, run in written.items()} == {confirmed.pk: 8, lost.pk: 8}


@pytest.mark.services
def test_a_locked_run_holds_up_no_other_and_is_returned_as_it_was():
    locked, others = running(), [running() for _ in range(2)]
    is_locked, release = threading.Event(), threading.Event()

    def lock() -> None:
        with transaction.atomic():
            Run.objects.select_for_update().get(pk=locked.pk)
            is_locked.set()
            assert release.wait(30)
        connection.close()

    holder = threading.Thread(target=lock)
    holder.start()
    try:
        assert is_locked.wait(30)
        written = lifecycle.append_text([(run, "text") for run in (others[0], locked, others[1])])
    finally:
        release.set()
        holder.join(30)
    assert written[locked.pk] is locked
    assert (texts(locked), row(locked)) == ([], (7, False))
    assert [texts(run) for run in others] == [[(8, "text")]] * 2
    assert lifecycle.append_text([(locked, "text")])[locked.pk].last_stream_index == 8


@pytest.mark.services
def test_the_text_of_any_number_of_runs_is_one_statement():
    runs = [running() for _ in range(5)]
    with CaptureQueriesContext(connection) as queries:
        lifecycle.append_text([(run, "text") for run in runs])
    assert len(queries) == 1, queries.captured_queries
