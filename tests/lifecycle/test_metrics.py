"""Tests of the metrics of runs: each outcome is counted once."""

import pytest
from django.db import transaction

from config.kernel import clock
from runs import lifecycle
from runs.models import Run, Worker
from tests import factories
from tests.driver import until
from tests.operations.conftest import limits, redis_server, scrape  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True)


def test_runs_and_calls_are_counted_when_they_end(bench, scrape):  # noqa: F811
    bench.finish('/call calculate {"expression": "1+1"}\n/call calculate {"expression": "1/0"}\n/call nothing {}')
    bench.finish("/fail broken")
    waiting = bench.ask("/ask Which?")
    bench.cancel(waiting["id"])
    shown = scrape()
    assert shown("runs_finished_total", status="completed", error="", reason="") == 1
    assert shown("runs_finished_total", status="failed", error="MODEL_ERROR", reason="model_failed") == 1
    assert shown("runs_finished_total", status="cancelled", error="", reason="") == 1
    assert {status: shown("run_seconds_count", status=status) for status in ("completed", "failed", "cancelled")} == {
        "completed": 1,
        "failed": 1,
        "cancelled": 1,
    }
    assert shown("run_start_seconds_count") == 3
    assert shown("tool_calls_total", tool="calculate", outcome="COMPLETED") == 1
    assert shown("tool_calls_total", tool="calculate", outcome="TOOL_ERROR") == 1
    assert shown("tool_calls_total", tool="ask_user", outcome="CANCELLED") == 1
    assert shown("tool_seconds_count", tool="calculate") == 2
    # A tool name that the model invented must not become a label.
    assert 'tool="nothing"' not in shown.text
    assert shown("credits_spent_total", tool="calculate") == 0.1
    assert shown("run_workers") == 1


def test_rolled_back_transition_is_not_counted(scrape, user):  # noqa: F811
    run = factories.RunFactory(chat__user=user, status="waiting")
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
        with transaction.atomic():
            lifecycle.request_cancel(run.pk)
            raise ZeroDivisionError
    assert not scrape()("runs_finished_total", status="cancelled", error="", reason="")


def test_lost_leases_are_counted(scrape, user):  # noqa: F811
    worker = Worker.objects.create(host="gone", pid=1, expires_at=clock.now())
    found = [factories.RunFactory(chat__user=user, status="running", worker_id=worker.pk) for _ in range(2)]
    until(lambda: lifecycle.reap_workers())
    assert Run.objects.filter(pk__in=[run.pk for run in found], lease_losses=1).count() == 2
    assert scrape()("run_leases_lost_total") == 2
