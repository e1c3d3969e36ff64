"""The runs of a lost worker are released in batches."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from config.kernel import clock
from config.queue import jobs
from credits import ledger
from credits.models import LedgerEntry
from runs import lifecycle
from runs.lifecycle import sweeps as transitions
from runs.models import Run, RunEvent, Turn, Worker
from tests import factories

pytestmark = pytest.mark.django_db

LOST = "wrk_lost"


def lost_run(**columns: Any) -> Run:
    since = clock.now() - timedelta(seconds=10)
    given = {"status": "running", "worker_id": LOST, "lease_token": 1, "running_since": since, "ran_ms": 500}
    return factories.RunFactory(**given | columns)


@pytest.mark.django_db(transaction=True)
def test_only_the_running_runs_of_lost_workers_are_released(nudges):
    worker = Worker.objects.create(host="x", pid=1, expires_at=clock.now() + timedelta(hours=1))
    kept = [
        lost_run(status="completed"),
        lost_run(status="cancelled"),
        lost_run(status="waiting"),
        lost_run(worker_id=worker.pk),
    ]
    columns = Run.objects.filter(pk__in=[run.pk for run in kept]).order_by("pk").values()
    before = list(columns.all())
    lost = [lost_run(lease_losses=number) for number in range(3)]
    lifecycle.reap_workers()
    for number, run in enumerate(lost):
        run.refresh_from_db()
        assert (run.status, run.worker_id, run.running_since) == ("running", None, None)
        assert (run.lease_token, run.lease_losses) == (2, number + 1)
        assert 10_500 <= run.ran_ms < 100_000
        assert run.due_at > clock.now()
    assert list(columns.all()) == before
    assert sorted(run_id for _, ids, _ in nudges for run_id in ids) == [run.pk for run in lost]


def test_a_run_that_ended_or_was_released_meanwhile_is_left_as_it_is():
    ended, released, lost = lost_run(), lost_run(), lost_run()
    rows = Run.objects.filter(worker_id=LOST, status="running")
    asked = [ended.pk, released.pk, lost.pk]
    factories.force_update(Run.objects.filter(pk=ended.pk), status="cancelled")
    assert transitions.release(rows, [released.pk]) == [released.pk]
    assert transitions.release(rows, asked) == [lost.pk]
    assert dict(Run.objects.values_list("pk", "lease_losses")) == {ended.pk: 0, released.pk: 1, lost.pk: 1}


def test_runs_that_lost_their_worker_too_often_fail(monkeypatch):
    monkeypatch.setattr("runs.lifecycle.line.RUN_LEASE_LOSSES_MAX", 3)
    worn, other = [lost_run(lease_losses=2) for _ in range(3)], lost_run(lease_losses=1)
    lifecycle.reap_workers()
    ended = Run.objects.filter(pk__in=[run.pk for run in worn]).values_list("status", "error_code")
    assert list(ended) == [("failed", "WORKER_LOST")] * 3
    assert Run.objects.get(pk=other.pk).status == "running"


def test_the_number_of_queries_does_not_depend_on_the_number_of_runs():
    def queries(number: int) -> int:
        for _ in range(number):
            lost_run()
        with CaptureQueriesContext(connection) as asked:
            lifecycle.reap_workers()
        return len(asked)

    assert queries(2) == queries(30)
    assert Run.objects.filter(worker_id=None).count() == 32


def test_a_run_that_cannot_be_released_keeps_no_other_run_of_its_batch(monkeypatch):
    monkeypatch.setattr("config.queue.jobs.HOUSEKEEPING_RETRY_SECONDS", 600)
    lost = [lost_run().pk for _ in range(5)]
    bad, batches, failed = lost[2], [], []
    move_lost = transitions.move_lost

    def refuse(runs: Sequence[Run]) -> None:
        batches.append([run.pk for run in runs])
        if bad in batches[-1]:
            raise RuntimeError("corrupt")
        move_lost(runs)

    monkeypatch.setattr(transitions, "move_lost", refuse)
    labels = jobs.rows_failed.labels
    monkeypatch.setattr(jobs.rows_failed, "labels", lambda job: failed.append(job) or labels(job))
    lifecycle.reap_workers()
    assert batches == [lost, *[[run_id] for run_id in lost]]
    assert list(Run.objects.filter(worker_id=LOST).values_list("pk", "lease_losses")) == [(bad, 0)]
    assert Run.objects.filter(lease_losses=1).count() == 4
    # For a time it is left out, so that later batches do not fail with it.
    later = [lost_run().pk for _ in range(2)]
    lifecycle.reap_workers()
    assert (batches[6:], failed) == ([later], ["sweep-runs"])


@pytest.fixture
def lost_turn() -> Run:
    """A run of a lost worker, whose open turn has streamed 12 characters of at most 100 micro-credits."""
    run = lost_run(unrecorded_text=True, last_stream_index=1)
    RunEvent.objects.create(run=run, index=1, type="message.delta", data='{"text": "twelve chars"}')
    ledger.grant(run.user_id, 1000, cause="test")
    price = {"model": "m", "in": 1000, "out": 1000, "estimatedTokens": 5, "charsPerToken": 4}
    lifecycle.hold_turn(run, 1, 1, 100, price)
    return run


@pytest.mark.parametrize("then", ["claim", "cancel", "give up", "nobody"])
def test_a_lost_turn_is_charged_once(monkeypatch, lost_turn, then):
    monkeypatch.setattr("runs.lifecycle.line.RUN_LEASE_LOSSES_MAX", 1 if then == "give up" else 5)
    lifecycle.reap_workers()
    if then == "claim":
        assert lifecycle.claim(lost_turn.pk, "wrk_next") is not None
    elif then == "cancel":
        lifecycle.request_cancel(lost_turn.pk)
    elif then == "nobody":
        factories.force_update(Run.objects.filter(pk=lost_turn.pk), updated_at=clock.now() - timedelta(seconds=10))
        assert transitions.settle_lost_turns() == 1
    assert transitions.settle_lost_turns() == 0
    usage = LedgerEntry.objects.filter(run_id=lost_turn.pk, type="USAGE")
    assert list(usage.values_list("amount", flat=True)) == [8]
    assert ledger.account_for(lost_turn.user_id).held == 0


def test_the_turn_of_a_run_that_was_just_released_is_left_to_its_next_owner(lost_turn):
    lifecycle.reap_workers()
    assert transitions.settle_lost_turns() == 0
    assert ledger.account_for(lost_turn.user_id).held == 100


def test_what_the_open_request_cost_is_charged_once_beside_an_older_hold(lost_turn):
    price = {"model": "m", "in": 1000, "out": 1000, "inputTokens": 10, "outputTokens": 20}
    hold = lifecycle.hold_turn(lost_turn, 1, 2, 50, price)
    lifecycle.end_request(lost_turn, None, "", lifecycle.Charge(hold, 30, price))
    usage = LedgerEntry.objects.filter(run_id=lost_turn.pk, type="USAGE")
    assert list(usage.values_list("amount", "against_id")) == [(30, hold.pk)]
    assert ledger.account_for(lost_turn.user_id).held == 0
    assert Run.objects.get(pk=lost_turn.pk).turn_count == 1


def test_text_of_recorded_turns_is_not_charged_again_with_the_open_one(lost_turn):
    now = clock.now()
    Turn.objects.create(run=lost_turn, index=1, model="m", text="twelve", started_at=now, finished_at=now)
    lifecycle.reap_workers()
    assert lifecycle.claim(lost_turn.pk, "wrk_next") is not None
    usage = LedgerEntry.objects.get(run_id=lost_turn.pk, type="USAGE")
    assert (usage.amount, usage.price["outputTokens"]) == (7, 2)


def test_what_a_free_model_used_before_its_request_ended_counts():
    run = lost_run()
    used = lifecycle.Charge(None, 0, {"inputTokens": 10, "outputTokens": 20})
    run = lifecycle.end_request(run, None, "", used).run
    assert (run.input_tokens, run.output_tokens, run.turn_count) == (10, 20, 1)
    assert not LedgerEntry.objects.filter(run_id=run.pk).exists()
