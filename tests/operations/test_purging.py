"""What is purged and pruned and when, what must remain, and concurrent jobs that do the work once."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals
from django.apps import apps
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apikeys.models import ApiKey
from chats import attachments
from chats import services as chat_services
from chats.models import Attachment, Chat, Message
from config import celery
from config.api import idempotency
from config.api.models import IdempotencyRecord
from config.database import batches
from config.kernel import clock
from config.kernel.errors import Unavailable
from config.kernel.ids import first_id, new_id
from config.queue import jobs
from credits import ledger
from credits.models import Account, LedgerEntry
from runs.lifecycle import sweeps
from runs.models import ClientRun, Compaction, ModelAttempt, Run, RunEvent, RunMetadata, ToolInvocation, Turn, Waitpoint
from runs.purge import EVENTS_BATCH, prune_events
from runs.tools import files
from tests import factories
from tests.credits.helpers import spend
from tests.threads import side_by_side
from tests.tiers import slow
from webhooks import services, transitions
from webhooks.models import Attempt, Delivery, Endpoint

pytestmark = pytest.mark.django_db

WORDS = "words-that-were-said"


def ago(**how_long: float) -> Any:
    return clock.now() - timedelta(**how_long)


@pytest.fixture
def stored(tmp_path, settings) -> Callable[[], list[str]]:
    """The files in the storage."""
    settings.MEDIA_ROOT = tmp_path / "files"

    def names() -> list[str]:
        root = tmp_path / "files"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    return names


def full_chat(user: Any, *, deleted_at: Any, status: str = "completed") -> Chat:
    """A chat with rows of every kind and with files."""
    chat = factories.ChatFactory(user=user, title=WORDS, deleted_at=deleted_at)
    run = factories.RunFactory(chat=chat, status=status, error_message=WORDS, finished_at=ago(days=31))
    RunMetadata.objects.create(run=run, user=user, key="said", value=WORDS, created_at=run.created_at)
    Turn.objects.create(run=run, index=1, model="demo", text=WORDS, started_at=ago(days=31), finished_at=ago(days=31))
    ModelAttempt.objects.create(
        run=run, turn_index=1, number=1, model="demo", provider="demo", reason="model_failed", detail=WORDS,
        started_at=ago(days=31), finished_at=ago(days=31),
    )  # fmt: skip
    ClientRun.objects.create(chat=chat, run=run, key="k" * 64)
    Compaction.objects.create(
        chat=chat, run=run, index=1, turn_index=1, kind="summary", text=WORDS, tokens_before=2, tokens_after=1,
        started_at=ago(days=31), finished_at=ago(days=31),
    )  # fmt: skip
    file_call = factories.ToolInvocationFactory(
        run=run, name="create_file", input={"fileName": "said.txt"}, result=WORDS
    )
    file_call.result_urls = [files.store(file_call.pk, "said.txt", WORDS.encode())]
    file_call.save(update_fields=["result_urls"])
    # The worker of this call died before it recorded the URL of the file.
    lost_call = factories.ToolInvocationFactory(run=run, name="draw_chart", status="FAILED")
    files.store(lost_call.pk, "chart.svg", WORDS.encode())
    factories.WaitpointFactory(
        run=run, status="COMPLETED", resolved_payload={"answer": WORDS}, invocation__status="COMPLETED"
    )
    for index in (1, 2):
        RunEvent.objects.create(run=run, index=index, type="message.delta", data=WORDS)
    message = factories.MessageFactory(chat=chat, run_id=run.pk, content=WORDS)
    attachment = factories.AttachmentFactory(user=user, message=message)
    name = default_storage.save(f"attachments/{attachment.pk}/file", ContentFile(WORDS.encode()))
    Attachment.objects.filter(pk=attachment.pk).update(stored_name=name)
    default_storage.delete(attachment.stored_name)
    factories.charge_turn(user, 1_000_000, run=run.pk, chat=chat.pk, index=1)
    return chat


HELD = (
    *(Chat, Message, Attachment, Run, RunMetadata, Turn, ModelAttempt, Compaction, ToolInvocation, Waitpoint),
    *(RunEvent, ClientRun),
)


# --- chats -----------------------------------------------------------------------------------------------------------
def test_a_deleted_chat_is_purged_except_its_ledger_entries(session, user, stored):
    chat = full_chat(user, deleted_at=ago(days=30, minutes=1))
    before = session.get("/api/v1/me/credits/usage-entries-by-chat").json()["entries"]
    assert [entry["chatTitle"] for entry in before] == [WORDS]
    assert len(stored()) == 3
    rows = list(LedgerEntry.objects.order_by("pk").values())
    assert chat_services.purge_chats() == 1
    assert {model.__name__: model._base_manager.count() for model in HELD} == dict.fromkeys(
        (model.__name__ for model in HELD), 0
    )
    assert stored() == []
    assert list(LedgerEntry.objects.order_by("pk").values()) == rows
    after = session.get("/api/v1/me/credits/usage-entries-by-chat").json()["entries"]
    assert [(entry["chatId"], entry["chatTitle"], entry["amount"]) for entry in after] == [(chat.pk, None, "1")]
    assert session.get(f"/api/v1/me/credits/ledger/chat/{chat.pk}").status_code == 200
    assert chat_services.purge_chats() == 0


def test_no_other_chat_is_touched(user, stored):
    for deleted_at in (None, ago(days=29, hours=23)):
        full_chat(user, deleted_at=deleted_at)
    counts = {model: model._base_manager.count() for model in HELD}
    assert chat_services.purge_chats() == 0
    assert {model: model._base_manager.count() for model in HELD} == counts
    assert len(stored()) == 6


def test_files_of_calls_are_found_after_a_key_change(user, stored, settings):
    """Also the file of a call whose worker died before it recorded the address."""
    full_chat(user, deleted_at=ago(days=31))
    settings.SECRET_KEY = "another" * 10
    chat_services.purge_chats()
    assert stored() == []


def test_only_files_of_the_call_itself_are_removed(user, stored):
    mine = full_chat(user, deleted_at=ago(days=31))
    kept = full_chat(factories.UserFactory(), deleted_at=None)
    other = ToolInvocation.objects.get(run__chat=kept, name="create_file")
    # The result of an external tool may name a file of another user.
    ToolInvocation.objects.filter(run__chat=mine, name="create_file").update(
        node_type="http", result_urls=other.result_urls
    )
    chat_services.purge_chats()
    (left,) = [name for name in stored() if name.endswith("said.txt")]
    assert other.pk in left


def test_a_storage_failure_delays_only_that_chat(user, stored, monkeypatch):
    first = full_chat(user, deleted_at=ago(days=40))
    full_chat(user, deleted_at=ago(days=35))
    stuck = Attachment.objects.get(message__chat=first).pk
    remove_all = attachments.files.remove_all

    def away(attachment_id: str) -> None:
        if attachment_id == stuck:
            raise Unavailable
        remove_all(attachment_id)

    monkeypatch.setattr(attachments.files, "remove_all", away)
    monkeypatch.setattr(chat_services, "CHATS_BATCH", 1)
    assert chat_services.purge_chats() == 1
    assert list(Chat.objects.all()) == [first]
    assert Run.objects.get().chat_id == first.pk
    monkeypatch.undo()


def test_a_chat_with_a_live_run_is_not_purged(user, stored):
    chat = full_chat(user, deleted_at=ago(days=31), status="running")
    assert chat_services.purge_chats() == 0
    assert Run.objects.filter(chat=chat).exists()
    assert Message.objects.count() == 0  # nobody can read the messages of a deleted chat


def test_a_purge_ends_early_when_the_worker_stops(user, stored):
    for _ in range(2):
        full_chat(user, deleted_at=ago(days=31))
    batches.stopping.set()
    try:
        assert chat_services.purge_chats() == 0
    finally:
        batches.stopping.clear()
    assert Chat.objects.count() == 2


def test_sigterm_stops_jobs_between_batches():
    celery.app.loader.import_default_modules()
    worked: list[int] = []

    def batch() -> int:
        worked.append(1)
        signals.worker_shutting_down.send(sender="worker", sig="TERM", how="Warm", exitcode=0)
        return 1

    try:
        assert batches.in_batches(batch) == 1
    finally:
        batches.stopping.clear()
    assert worked == [1]


def test_every_reference_to_purged_rows_is_purged():
    """The purge must include every table that refers to a chat or a run, or its rows would keep the chat."""
    hanging = {
        field.model
        for model in apps.get_models()
        for field in model._meta.get_fields()
        if field.is_relation and field.concrete and field.related_model in HELD
    }
    assert hanging <= set(HELD)


# --- attachments -----------------------------------------------------------------------------------------------------
def test_old_unused_attachments_are_removed(user, stored):
    chat = factories.ChatFactory(user=user)
    old = ago(days=31)
    unused = factories.AttachmentFactory(user=user, created_at=old)
    factories.AttachmentFactory(user=user, created_at=old, message=factories.MessageFactory(chat=chat))
    factories.AttachmentFactory(user=user, created_at=ago(days=29))
    factories.AttachmentFactory(user=user, created_at=old, status="EXPIRED", stored_name="")
    default_storage.save(f"attachments/{unused.pk}/file", ContentFile(b"left"))
    assert attachments.purge_attachments() == 2
    assert not any(unused.pk in name for name in stored())
    assert Attachment.objects.count() == 2


def test_an_attachment_that_a_message_uses_during_the_purge_stays(user, monkeypatch):
    unused, used = (factories.AttachmentFactory(user=user, created_at=ago(days=days)) for days in (32, 31))
    message, removed = factories.MessageFactory(chat__user=user), []

    def remove(attachment_id: str) -> None:
        removed.append(attachment_id)
        attachments.use([used], message.pk)

    monkeypatch.setattr(attachments.files, "remove_all", remove)
    assert attachments.purge_attachments() == 1
    assert removed == [unused.pk]
    assert [(kept.pk, kept.status) for kept in Attachment.objects.all()] == [(used.pk, "READY")]


# --- concurrent jobs -------------------------------------------------------------------------------------------------
def old_events(user: Any) -> None:
    for number in range(20):
        run = factories.RunFactory(
            id=f"{first_id('run', ago(days=40))}{number:016}", chat__user=user, finished_at=ago(days=31)
        )
        RunEvent.objects.create(run=run, index=1, type="run.status", data="{}")


def old_deliveries(user: Any) -> None:
    for _ in range(20):
        endpoint = factories.EndpointFactory(user=user, deleted_at=ago(days=31))
        factories.AttemptFactory(delivery=factories.DeliveryFactory(endpoint=endpoint, finished_at=ago(days=31)))


def old_keys(user: Any) -> None:
    for number in range(20):
        IdempotencyRecord.objects.create(
            user=user, surface="session", key=str(number), fingerprint="", claim="", claimed_at=ago(days=2)
        )


def old_sessions(user: Any) -> None:
    for number in range(20):
        Session.objects.create(session_key=f"old{number}", session_data="", expire_date=ago(days=1))
    Session.objects.create(session_key="live", session_data="", expire_date=ago(days=-1))


def lapsed_uploads(user: Any) -> None:
    for _ in range(20):
        factories.AttachmentFactory(user=user, status="PENDING", expires_at=ago(hours=1))


def unused_rows(user: Any) -> None:
    for _ in range(20):
        factories.AttachmentFactory(user=user, status="EXPIRED", stored_name="", created_at=ago(days=31))


def deleted_chats(user: Any) -> None:
    for _ in range(8):
        full_chat(user, deleted_at=ago(days=31))


def late_waitpoints(user: Any) -> None:
    for _ in range(5):
        waiting = factories.RunFactory(chat__user=user, status="waiting")
        factories.WaitpointFactory(run=waiting, expires_at=ago(minutes=1))


def due_deliveries(user: Any) -> None:
    endpoint = factories.EndpointFactory(user=user)
    factories.DeliveryFactory(endpoint=endpoint, status="PENDING", finished_at=None, next_attempt_at=ago(minutes=1))


def waiting_deliveries(user: Any) -> None:
    endpoint = factories.EndpointFactory(user=user)
    factories.DeliveryFactory.create_batch(
        22, endpoint=endpoint, status="PENDING", finished_at=None, next_attempt_at=ago(minutes=1)
    )


def lapsed_grants(user: Any) -> None:
    for number in range(6):
        other = factories.UserFactory()
        ledger.grant(other.pk, 5_000_000, cause=f"test:{number}", expires_at=ago(days=-1))
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("UPDATE credits_pendingexpiry SET expires_at = now() - interval '1 hour'")
    else:
        from credits.models import PendingExpiry

        PendingExpiry.objects.update(expires_at=ago(hours=1))


def low_balances(user: Any) -> None:
    services.register(services.INSTALLATION, "http://127.0.0.1:9/", rotate=False, extended=True)
    for _ in range(6):
        spend(factories.UserFactory(), 90_000_000)


JOBS: dict[str, tuple[Callable[[Any], None], Callable[[], list[int]], int]] = {
    # job → (creates its rows, counts the remaining rows, rows that both executions process together)
    "prune-run-events": (old_events, lambda: [RunEvent.objects.count()], 20),
    "prune-webhooks": (
        old_deliveries,
        lambda: [Delivery.objects.count(), Attempt.objects.count(), Endpoint.objects.count()],
        40,
    ),
    "trim-webhooks": (waiting_deliveries, lambda: [Delivery.objects.filter(status="PENDING").count() - 2], 20),
    "prune-idempotency": (old_keys, lambda: [IdempotencyRecord.objects.count()], 20),
    "prune-sessions": (old_sessions, lambda: [Session.objects.exclude(session_key="live").count()], 20),
    "expire-attachments": (lapsed_uploads, lambda: [Attachment.objects.exclude(expires_at=None).count()], 20),
    "purge-attachments": (unused_rows, lambda: [Attachment.objects.count()], 20),
    "purge-chats": (deleted_chats, lambda: [model._base_manager.count() for model in HELD], 8),
    "sweep-runs": (late_waitpoints, lambda: [Waitpoint.objects.filter(status="PENDING").count()], 5),
    "sweep-low-credits": (
        low_balances,
        lambda: [
            6 - Delivery.objects.filter(event_type="credits.low").count(),
            Account.objects.exclude(low_due=0).count(),
        ],
        6,
    ),
    "expire-grants": (lapsed_grants, lambda: [LedgerEntry.objects.filter(type="EXPIRY").count() - 6], 6),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("job", JOBS)
def test_concurrent_jobs_process_each_row_once(job, user, stored, settings, monkeypatch):
    monkeypatch.setattr("webhooks.transitions.WEBHOOK_PENDING_MAX", 2)
    for module, name in ((batches, "BATCH"), (idempotency, "PRUNE_BATCH"), (sweeps, "BATCH"), (transitions, "BATCH")):
        monkeypatch.setattr(module, name, 3)
    prepare, left, rows = JOBS[job]
    prepare(user)
    assert any(left())
    seen: list[int] = []
    done = jobs.rows_done
    monkeypatch.setattr(done, "labels", lambda job: SimpleNamespace(inc=seen.append))
    celery.app.loader.import_default_modules()
    task = celery.app.tasks[settings.CELERY_BEAT_SCHEDULE[job]["task"]]
    # One execution skips the rows that the other has locked. The next round finds them.
    for _ in range(4):
        side_by_side(2, lambda _: task.apply(throw=True))
    assert left() == [0] * len(left())
    if job not in ("sweep-runs", "expire-grants"):  # these also count rows that the other execution has processed
        assert sum(seen) == rows


def test_every_job_is_in_the_concurrency_test(settings):
    assert set(JOBS) | {"sweep-webhooks", "measure-typical-credits"} == set(settings.CELERY_BEAT_SCHEDULE)


@pytest.mark.django_db(transaction=True)
def test_concurrent_webhook_sweeps_only_publish_messages(user, nudges):
    due_deliveries(user)
    celery.app.loader.import_default_modules()
    side_by_side(2, lambda _: celery.app.tasks["webhooks.sweep"].apply(throw=True))
    assert {task for task, *_ in nudges} == {"webhooks.deliver_due"}
    assert Delivery.objects.get().status == "PENDING"


def test_a_run_with_many_events_is_pruned_by_a_statement_of_normal_length():
    """PostgreSQL takes at most 65,535 parameters."""
    run = factories.RunFactory(id=f"{first_id('run', ago(days=40))}{1:016}", finished_at=ago(days=31))
    RunEvent.objects.bulk_create(RunEvent(run=run, index=index, type="x", data="{}") for index in range(1, 1001))
    with CaptureQueriesContext(connection) as queries:
        assert prune_events() == 1000
    assert not RunEvent.objects.exists()
    assert max(len(query["sql"]) for query in queries) < 2000


@pytest.mark.parametrize("job", ["prune-run-events", *slow("purge-chats")])
def test_a_run_with_more_events_than_a_batch_is_emptied_in_several_transactions(job, user, stored, settings):
    """Each statement must end within DATABASE_ANSWER_SECONDS."""
    last = 2 * EVENTS_BATCH + 1
    run = factories.RunFactory(
        id=f"{first_id('run', ago(days=40))}{1:016}",
        chat__user=user,
        chat__deleted_at=ago(days=31) if job == "purge-chats" else None,
        finished_at=ago(days=31),
        last_stream_index=last,
    )
    RunEvent.objects.bulk_create(
        (RunEvent(run=run, index=index, type="x", data="{}") for index in range(1, last + 1)), batch_size=5000
    )
    celery.app.loader.import_default_modules()
    with CaptureQueriesContext(connection) as queries:
        celery.app.tasks[settings.CELERY_BEAT_SCHEDULE[job]["task"]].apply(throw=True)
    assert not RunEvent.objects.exists()
    assert Run.objects.exists() == (job == "prune-run-events")
    deletes = [query["sql"] for query in queries if query["sql"].startswith('DELETE FROM "runs_runevent"')]
    bounds = [f'"index" <= {batch * EVENTS_BATCH}' for batch in (1, 2, 3)]
    assert [any(bound in sql for sql in deletes) for bound in bounds] == [True, True, True], deletes


def test_users_keys_and_live_endpoints_are_not_pruned(user):
    """Users, keys, live endpoints and balances never expire by age."""
    factories.EndpointFactory(user=user, created_at=ago(days=4000))
    ApiKey.objects.create(
        user=user, name="old", prefix="awk_0000", digest=new_id("key"), scopes=[], expires_at=ago(days=4000)
    )
    celery.app.loader.import_default_modules()
    for entry in celery.app.conf.beat_schedule.values():
        celery.app.tasks[entry["task"]].apply(throw=True)
    assert (Endpoint.objects.count(), ApiKey.objects.count()) == (1, 1)
    assert get_user_model().objects.count() == 1
