"""Tests of runs whose worker dies, shuts down or has no free capacity."""

from datetime import UTC, datetime

import pytest
from django.db import transaction
from django.db.models import F

from config.kernel import clock
from config.kernel.money import MICRO
from credits import ledger
from credits.models import LedgerEntry
from runs import lifecycle
from runs.models import ModelAttempt, Run, RunEvent, ToolInvocation, Worker
from runs.tools.base import ToolResult
from tests import factories
from tests.driver import Driver, InProcess, until
from tests.factories import RunFactory, force_update
from tests.lifecycle.conftest import joined, vanish

pytestmark = pytest.mark.django_db(transaction=True)

AT = datetime(2026, 1, 1, tzinfo=UTC)


def test_run_of_a_lost_worker_is_resumed_without_repeated_steps(bench, engines, events, monkeypatch):
    """The lease of the lost worker expires, and another worker continues from the journal."""
    run = bench.start('/call calculate {"expression": "6*7"}\n/stream 60 50\n/say {result}')
    until(lambda: any(kind == "message.delta" for kind, _ in events(run["id"])))
    vanish(bench.engine)
    second = engines()
    assert second.process.worker_id != bench.engine.process.worker_id
    run = bench.wait(run["id"], timeout=30)
    assert run["status"] == "completed"
    assert ToolInvocation.objects.count() == 1
    assert "message.reset" in [kind for kind, _ in events(run["id"])]
    assert bench.content(run) == joined(events(run["id"]))
    assert Run.objects.get().lease_losses == 1
    assert [data["status"] for kind, data in events(run["id"]) if kind == "run.status"] == [
        "queued",
        "running",
        "completed",
    ]


def test_run_fails_after_too_many_lost_leases(bench, monkeypatch):
    monkeypatch.setattr("runs.lifecycle.line.RUN_LEASE_LOSSES_MAX", 1)
    run = bench.start("/wait 30")
    bench.wait(run["id"], "running")
    user_id = Run.objects.get().user_id
    ledger.hold(
        user_id, 7, invocation_id="inv_x", tool_key="x", chat_id=run["chatId"], run_id=run["id"], price={"perCall": 7}
    )
    vanish(bench.engine)

    def swept():
        lifecycle.reap_workers()
        return Run.objects.get().status == "failed"

    until(swept)
    assert bench.get(run["id"])["errorCode"] == "WORKER_LOST"
    assert ledger.account_for(user_id).held == 0


def test_handover_at_shutdown_is_not_a_lost_lease(bench, engines, events):
    run = bench.start("/stream 40 50\n/say end")
    bench.wait(run["id"], "running")
    first, second = bench.engine, engines()
    first.stop(0)
    run = bench.wait(run["id"])
    assert run["status"] == "completed"
    assert Run.objects.get().lease_losses == 0
    assert bench.content(run) == joined(events(run["id"]))
    assert not Worker.objects.filter(pk=first.process.worker_id).exists()
    assert second.process.worker_id


def test_runs_over_the_user_limit_start_in_order(bench, settings, user):
    settings.RUN_USER_LIMIT = 3

    def running() -> set[str]:
        return set(Run.objects.filter(user=user, status="running").values_list("pk", flat=True))

    started = [bench.start("/wait 600")["id"] for _ in range(3)]
    until(lambda: running() == set(started))
    started += [bench.start("/wait 600")["id"] for _ in range(4)]
    until(lambda: Run.objects.filter(pk__in=started, throttled=True).count() == 4)
    others = Driver(InProcess(factories.session_client(factories.UserFactory())))
    assert others.finish("Hello")["status"] == "completed"
    for at in range(4):
        assert running() == set(started[at : at + 3])
        bench.cancel(started[at])
        until(lambda at=at: running() == set(started[at + 1 : at + 4]))


def test_throttled_runs_start_after_the_limit_is_removed(bench, settings):
    settings.RUN_USER_LIMIT = 1
    running = bench.start("/wait 600")["id"]
    bench.wait(running, "running")
    waiting = [bench.start("Hello")["id"] for _ in range(2)]
    until(lambda: Run.objects.filter(pk__in=waiting, throttled=True).count() == 2)
    until(lambda: not bench.engine.tasks.keys() & set(waiting))  # a nudge for a run that already has a task is ignored
    settings.RUN_USER_LIMIT = 0  # as if the service restarted with this setting
    assert [bench.wait(run_id)["status"] for run_id in waiting] == ["completed", "completed"]


def test_text_written_during_shutdown_does_not_prevent_the_handover(bench, monkeypatch):
    run_id = bench.start("/stream 400 50")["id"]
    bench.wait(run_id, "running")
    hand_over, refused = lifecycle.hand_over, []

    def overtaken(run):
        if not refused:
            refused.append(run.id)
            # The flusher still runs and can write between the read of the run and its handover.
            with transaction.atomic():
                Run.objects.filter(pk=run.id).update(last_stream_index=F("last_stream_index") + 1)
                index = Run.objects.values_list("last_stream_index", flat=True).get(pk=run.id)
                RunEvent.objects.create(run_id=run.id, index=index, type="message.delta", data='{"text":""}')
        hand_over(run)

    monkeypatch.setattr(lifecycle, "hand_over", overtaken)
    bench.engine.stop(0)
    assert refused == [run_id]
    run = Run.objects.get(pk=run_id)
    assert (run.status, run.worker_id, run.lease_losses) == ("running", None, 0)


def test_failed_text_write_is_retried_while_the_model_is_silent(bench, events, monkeypatch):
    write, refused = lifecycle.append_text, []

    def once_refused(batch):
        if not refused:
            refused.append(batch)
            raise RuntimeError("for once")
        return write(batch)

    monkeypatch.setattr(lifecycle, "append_text", once_refused)
    run_id = bench.start("/say so far\n/wait 600")["id"]
    until(lambda: joined(events(run_id)) == "so far")
    assert refused


def test_a_former_owner_ends_no_request():
    now = clock.now()
    run = RunFactory(status="running", worker_id="wrk_new", lease_token=3, running_since=now)
    former = Run.objects.get(pk=run.pk)
    former.lease_token, former.worker_id = 2, "wrk_old"
    attempt = ModelAttempt(
        run=run, turn_index=1, number=1, model="m", provider="p", reason="time_out", started_at=now, finished_at=now
    )
    with pytest.raises(lifecycle.LeaseLost):
        lifecycle.end_request(former, attempt, "", None)
    stored = Run.objects.get(pk=run.pk)
    assert (stored.model_retries, stored.last_stream_index) == (run.model_retries, run.last_stream_index)
    assert not ModelAttempt.objects.exists()


def test_a_call_that_has_ended_gets_no_other_outcome():
    run = RunFactory(status="running", worker_id="wrk_1", lease_token=3, running_since=clock.now())
    call = factories.ToolInvocationFactory(run=run, status="DISPATCHING")
    force_update(ToolInvocation.objects.filter(pk=call.pk), status="FAILED")
    with pytest.raises(lifecycle.LeaseLost):
        lifecycle.record_call_result(run, call, ToolResult("late"))
    assert ToolInvocation.objects.get().status == "FAILED"
    assert not RunEvent.objects.exists()


@pytest.mark.parametrize(
    "now", [{"lease_token": 4}, {"worker_id": "wrk_new"}, {"status": "waiting"}, {"cancel_requested_at": AT}]
)
def test_nothing_is_held_for_a_request_of_a_former_owner(now):
    run = RunFactory(status="running", worker_id="wrk_old", lease_token=3, running_since=clock.now())
    force_update(Run.objects.filter(pk=run.pk), **now)
    with pytest.raises(lifecycle.LeaseLost):
        lifecycle.hold_turn(run, 1, 1, MICRO, {})
    assert not LedgerEntry.objects.filter(type="HOLD").exists()
