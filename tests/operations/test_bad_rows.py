"""A row that cannot be processed ends neither its job nor the other rows, and does not hide them."""

import logging
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from django.db import OperationalError

from chats import attachments
from chats import services as chat_services
from chats.models import Attachment, AttachmentStatus, Chat
from config.database import batches
from config.kernel import clock
from config.kernel.ids import first_id
from config.queue import jobs
from credits import grants, ledger
from credits.models import Account, LedgerEntry, PendingExpiry
from runs import purge as run_purge
from runs.lifecycle import sweep, sweeps, take_due_runs
from runs.models import Run, RunEvent, Waitpoint
from runs.tools import files
from tests import factories
from tests.factories import force_update
from webhooks import tasks as webhook_tasks
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def retried_at_once(monkeypatch):
    monkeypatch.setattr("config.queue.jobs.HOUSEKEEPING_RETRY_SECONDS", 0)


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """The jobs of the rows that were counted as failed."""
    found: list[str] = []
    monkeypatch.setattr(jobs.rows_failed, "labels", lambda job: SimpleNamespace(inc=lambda: found.append(job)))
    return found


def ago(**how_long: float) -> Any:
    return clock.now() - timedelta(**how_long)


def refuse(bad: set[Any], work: Callable[..., Any], calls: list[Any] | None = None) -> Callable[..., Any]:
    """``work``, but it raises for the keys in ``bad``."""

    def worked(key: Any, *args: Any, **options: Any) -> Any:
        if calls is not None:
            calls.append(key)
        if key in bad:
            raise RuntimeError("corrupt")
        return work(key, *args, **options)

    return worked


def answered(code: type[Exception]) -> OperationalError:
    error = OperationalError()
    error.__cause__ = code()
    return error


# --- the helper ------------------------------------------------------------------------------------------------------
def test_each_bad_row_is_counted_and_only_some_are_logged(counted, caplog):
    bad = set(range(100))
    with caplog.at_level(logging.ERROR, "config.queue.jobs"):
        assert sum(jobs.each("job-a", range(105), refuse(bad, lambda key: 1))) == 5
    assert counted == ["job-a"] * 100
    assert 1 <= len(caplog.records) <= jobs.LOGGED_MAX + 1
    assert "job-a could not process 0" in caplog.text


def test_a_bad_row_is_left_out_for_a_time(monkeypatch, counted):
    monkeypatch.setattr("config.queue.jobs.HOUSEKEEPING_RETRY_SECONDS", 600)
    calls: list[int] = []
    for _ in range(3):
        assert list(jobs.each("job-b", range(3), refuse({1}, lambda key: key, calls))) == [0, 2]
    assert calls.count(1) == 1
    assert list(jobs.each("job-c", [1], lambda key: key)) == [1]  # another job's row


def test_a_lost_database_ends_the_job(counted):
    def away(key: int) -> int:
        raise answered(psycopg.errors.AdminShutdown)

    with pytest.raises(OperationalError):
        list(jobs.each("job-d", range(3), away))
    with pytest.raises(OperationalError):
        jobs.stages("job-d", lambda: away(1), lambda: 1)
    assert counted == []


@pytest.mark.django_db(transaction=True)
def test_a_lock_that_is_not_free_in_time_is_one_rows_failure(counted):
    def locked(key: int) -> int:
        if key:
            return key
        raise answered(psycopg.errors.LockNotAvailable)

    assert list(jobs.each("job-e", range(3), locked)) == [1, 2]
    assert counted == ["job-e"]


def test_stages_follow_a_stage_that_fails(monkeypatch):
    failed: list[str] = []
    monkeypatch.setattr(jobs.failures, "labels", lambda job: SimpleNamespace(inc=lambda: failed.append(job)))

    def broken() -> int:
        raise RuntimeError

    assert jobs.stages("job-f", lambda: 1, broken, lambda: 2) == 3
    assert failed == ["job-f"]


# --- runs ------------------------------------------------------------------------------------------------------------
def late_waitpoint(**how_long: float) -> str:
    return str(factories.WaitpointFactory(expires_at=ago(**how_long)).pk)


def test_many_bad_waitpoints_do_not_hide_a_good_one(monkeypatch, counted):
    monkeypatch.setattr(sweeps, "BATCH", 2)
    bad = {late_waitpoint(minutes=10) for _ in range(5)}
    good = late_waitpoint(minutes=1)
    monkeypatch.setattr("runs.lifecycle.waitpoints.expire_waitpoint", refuse(bad, sweeps.waitpoints.expire_waitpoint))
    assert sweeps.expire_waitpoints() == 1
    assert Waitpoint.objects.get(pk=good).status == "EXPIRED"
    assert len(counted) == 5


def test_a_broken_stage_of_the_sweep_does_not_stop_the_others(monkeypatch):
    good = late_waitpoint(minutes=1)

    def settle_lost_turns(seconds: float) -> int:
        raise RuntimeError

    monkeypatch.setattr(sweeps, "settle_lost_turns", settle_lost_turns)
    sweep()
    assert Waitpoint.objects.get(pk=good).status == "EXPIRED"


def test_runs_that_nobody_can_claim_do_not_hide_a_due_run():
    for _ in range(3):
        force_update(Run.objects.filter(pk=factories.RunFactory(status="queued").pk), due_at=ago(minutes=2))
    good = factories.RunFactory(status="queued").pk
    force_update(Run.objects.filter(pk=good), due_at=ago(minutes=1))
    taken = take_due_runs(3) + take_due_runs(3)
    assert taken[-1] == good
    assert take_due_runs(3) == []


def test_runs_are_resumed_although_those_of_another_user_cannot_be(monkeypatch, counted):
    asked = [factories.WaitpointFactory(run__status="waiting", invocation=None, needed=1) for _ in range(3)]
    monkeypatch.setattr(sweeps, "BATCH", 1)
    monkeypatch.setattr(sweeps, "_next_look", float("-inf"))
    resume = sweeps.waitpoints.resume_paid
    monkeypatch.setattr(sweeps.waitpoints, "resume_paid", refuse({asked[0].run.user_id}, resume))
    sweeps.resume_paid_runs()
    assert [Run.objects.get(pk=waitpoint.run_id).status for waitpoint in asked] == ["waiting", "queued", "queued"]
    assert counted == ["sweep-runs"]


def test_users_at_their_limit_do_not_hide_a_throttled_run(settings, monkeypatch):
    settings.RUN_USER_LIMIT = 1
    monkeypatch.setattr(sweeps, "BATCH", 2)
    for _ in range(5):
        user = factories.RunFactory(status="running").user
        factories.RunFactory(chat__user=user, status="queued", throttled=True)
    wakeable = {factories.RunFactory(status="queued", throttled=True).pk for _ in range(3)}
    found: list[str] = []
    after = 0
    for _ in range(8):
        some, after = sweeps.wakeable_runs(1, after)
        found += some
    assert set(found) == wakeable
    settings.RUN_USER_LIMIT = 0
    assert len(sweeps.wakeable_runs(100)[0]) == 2


def test_events_are_pruned_after_a_batch_that_fails(monkeypatch, counted):
    monkeypatch.setattr(run_purge, "RUNS_BATCH", 1)
    runs = [
        factories.RunFactory(id=f"{first_id('run', ago(days=40))}{number:016}", finished_at=ago(days=31)).pk
        for number in range(3)
    ]
    for run_id in runs:
        RunEvent.objects.create(run_id=run_id, index=1, type="run.status", data="{}")
    take = batches.take_batch

    def refused(rows: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if rows.filter(pk=runs[0]).exists():
            raise RuntimeError
        return take(rows, *args, **kwargs)

    monkeypatch.setattr(batches, "take_batch", refused)
    assert run_purge.prune_events() == 2
    assert RunEvent.objects.get().run_id == runs[0]


# --- other apps ------------------------------------------------------------------------------------------------------
def test_grants_expire_after_an_account_that_fails(monkeypatch, counted):
    users = [factories.UserFactory() for _ in range(3)]
    for user in users:
        ledger.grant(user.pk, 5_000_000, cause=f"test:{user.pk}", expires_at=clock.now() + timedelta(hours=1))
    PendingExpiry.objects.update(expires_at=ago(hours=1))
    unspent = grants.unspent
    monkeypatch.setattr(grants, "unspent", refuse({users[0].pk}, unspent))
    assert sum(grants.expire_grants()) == 10_000_000
    assert counted == ["expire-grants"]
    assert not LedgerEntry.objects.filter(account=users[0].pk, type="EXPIRY").exists()
    monkeypatch.setattr(grants, "unspent", unspent)
    assert sum(grants.expire_grants()) == 5_000_000


def test_low_balances_are_reported_after_an_account_that_fails(monkeypatch, counted):
    users = [factories.UserFactory() for _ in range(4)]
    Account.objects.filter(pk__in=[user.pk for user in users]).update(low_due=1)
    monkeypatch.setattr(ledger, "LOW_BATCH", 2)
    monkeypatch.setattr(ledger.outbox, "report_credits", refuse({users[0].pk}, ledger.outbox.report_credits))
    assert ledger.report_low() == 3
    assert Account.objects.exclude(low_due=0).get().user == users[0]
    assert counted == ["sweep-low-credits"]


def test_chats_are_purged_after_one_that_fails(user, monkeypatch, counted):
    first, second = (factories.ChatFactory(user=user, deleted_at=ago(days=age)) for age in (32, 31))
    call = factories.ToolInvocationFactory(run__chat=first, name="create_file")
    monkeypatch.setattr(chat_services, "CHATS_BATCH", 1)
    remove_all = files.remove_all
    monkeypatch.setattr(files, "remove_all", refuse({call.pk}, remove_all))
    assert chat_services.purge_chats() == 1
    assert list(Chat.objects.all()) == [first]
    assert counted == ["purge-chats"]
    monkeypatch.setattr(files, "remove_all", remove_all)
    assert chat_services.purge_chats() == 1


def test_attachments_expire_after_one_that_fails(monkeypatch, counted):
    late = [factories.AttachmentFactory(status="PENDING", expires_at=ago(minutes=age)).pk for age in (4, 3, 2)]
    monkeypatch.setattr(attachments, "SWEEP_BATCH", 1)
    monkeypatch.setattr(attachments.files, "remove_all", refuse({late[0]}, attachments.files.remove_all))
    assert attachments.expire_attachments() == 2
    assert list(Attachment.objects.exclude(expires_at=None).values_list("pk", flat=True)) == [late[0]]
    assert counted == ["expire-attachments"]


def test_deleted_endpoints_are_pruned_although_deliveries_are_not(monkeypatch):
    factories.EndpointFactory(deleted_at=ago(days=31))
    kept = factories.DeliveryFactory(finished_at=ago(days=31))

    def broken(*args: Any) -> int:
        raise RuntimeError

    monkeypatch.setattr(webhook_tasks, "remove_deliveries", broken)
    webhook_tasks.prune()
    assert Delivery.objects.get() == kept
    assert list(Endpoint.objects.all()) == [kept.endpoint]


def test_unused_attachments_are_deleted_although_others_do_not_expire(user, monkeypatch):
    factories.AttachmentFactory(user=user, created_at=ago(days=31), status=AttachmentStatus.EXPIRED, stored_name="")
    kept = factories.AttachmentFactory(user=user, created_at=ago(days=31), content=b"kept")
    monkeypatch.setattr(attachments.files, "remove_all", refuse({kept.pk}, attachments.files.remove_all))
    assert attachments.purge_attachments() == 1
    assert Attachment.objects.get() == kept
