"""Tests of the runs that are queued behind a chat's active run: their number, and their end with the chat."""

import threading
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from config.kernel import clock
from runs import lifecycle
from runs.models import Run, RunEvent
from tests import factories
from tests.driver import until
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db(transaction=True)

HELD = '/usage 0 0\n/call draw_chart {"title": "T", "series": [1]}'


def enqueue(client: Any, chat: str) -> tuple[int, str]:
    body = {"message": "Hello", "onActiveRun": "enqueue"}
    answer = client.post(f"/api/v1/chats/{chat}/runs", body, format="json")
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def new_chat(client: Any) -> str:
    return str(client.post("/api/v1/chats", {}, format="json").json()["id"])


def test_a_chat_queues_a_limited_number_of_runs(session, settings):
    settings.RUN_QUEUE_MAX = 2
    chat = new_chat(session)
    assert [enqueue(session, chat)[0] for _ in range(3)] == [201] * 3  # the first is the active one
    assert enqueue(session, chat) == (409, "CONFLICT")
    assert Run.objects.count() == len(session.get(f"/api/v1/chats/{chat}/messages").json()["items"]) == 3
    assert enqueue(session, new_chat(session)) == (201, "")
    last = session.get(f"/api/v1/chats/{chat}/runs").json()["items"][0]
    session.post(f"/api/v1/runs/{last['id']}/cancel")
    assert enqueue(session, chat) == (201, "")
    assert enqueue(session, chat) == (409, "CONFLICT")


def test_simultaneous_requests_do_not_pass_the_limit(session, user, settings):
    settings.RUN_QUEUE_MAX = 3
    chat = new_chat(session)
    enqueue(session, chat)
    answers = side_by_side(8, lambda index: enqueue(factories.session_client(user), chat))
    assert sorted(answers) == [(201, "")] * 3 + [(409, "CONFLICT")] * 5
    assert Run.objects.filter(blocked=True).count() == 3


@pytest.mark.parametrize("status", ["queued", "running", "waiting"])
@pytest.mark.parametrize("active", ["running", "waiting"])
def test_the_database_refuses_a_second_active_run_of_a_chat(active, status):
    chat = factories.RunFactory(status=active).chat
    with pytest.raises(IntegrityError):
        factories.RunFactory(chat=chat, status=status)
    with pytest.raises(IntegrityError):
        factories.RunFactory(status=active, blocked=True)
    assert factories.RunFactory(chat=chat, status="queued", blocked=True).pk


def test_a_run_that_comes_while_the_active_one_completes_is_next(bench, monkeypatch):
    """The completion begins before the new run is committed, and waits for the chat."""
    complete, reached, goes_on = lifecycle.complete, threading.Event(), threading.Event()

    def held_back(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        assert goes_on.wait(30)
        return complete(*args, **kwargs)

    monkeypatch.setattr(lifecycle, "complete", held_back)
    first = bench.start("/say one")
    assert reached.wait(30)
    with transaction.atomic():
        second = bench.start("/say two", first["chatId"], onActiveRun="enqueue")
        goes_on.set()
        until(someone_waits_for_a_lock)
    assert [bench.wait(run["id"])["status"] for run in (first, second)] == ["completed", "completed"]
    assert lifecycle.violations() == []


def someone_waits_for_a_lock() -> bool:
    if connection.vendor != "postgresql":
        return True  # SQLite has one writer, and no view of who waits
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return bool(cursor.fetchone()[0])


def queries_of_deleting(client: Any, chat: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert client.delete(f"/api/v1/chats/{chat}").status_code == 204
    return len(captured)


def test_queued_runs_end_with_their_chat_by_one_statement(session, settings):
    """The number of statements does not depend on the number of runs, also if there are more than the limit."""
    few, many = new_chat(session), new_chat(session)
    for chat, number in ((few, 3), (many, 60)):
        assert [enqueue(session, chat)[0] for _ in range(number)] == [201] * number
    settings.RUN_QUEUE_MAX = 10
    assert queries_of_deleting(session, few) == queries_of_deleting(session, many)
    runs = Run.objects.all()
    assert {run.status for run in runs} == {"cancelled"}
    assert all(run.cancel_requested_at and run.finished_at and not run.blocked for run in runs)
    assert RunEvent.objects.filter(type="run.status", final=True, index=2).count() == 63
    assert lifecycle.violations() == []
    assert enqueue(session, many) == (404, "NOT_FOUND")


def test_a_deleted_chat_releases_the_hold_of_a_run_that_is_queued_again(bench):
    """An approved run has a hold while it is queued for a worker; the runs behind it have none."""
    run = bench.ask(HELD)
    bench.engine.stop(0)
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    assert [enqueue(bench.client, run["chatId"])[0] for _ in range(3)] == [201] * 3
    assert (bench.get(run["id"])["status"], bench.credits()["held"]) == ("queued", "12")
    queries_of_deleting(bench.client, run["chatId"])
    assert bench.credits() == {"balance": "100", "held": "0", "available": "100", "expiring": []}
    assert set(Run.objects.values_list("status", flat=True)) == {"cancelled"}
    assert lifecycle.violations() == []
    call_command("reconcile_credits", stdout=StringIO())


def test_a_deleted_chat_stops_its_running_run_and_promotes_none(bench):
    run = bench.start("/wait 600")
    bench.wait(run["id"], "running")
    assert [enqueue(bench.client, run["chatId"])[0] for _ in range(3)] == [201] * 3
    begun = clock.now()
    queries_of_deleting(bench.client, run["chatId"])
    assert not Run.objects.filter(blocked=True).exists()
    until(lambda: Run.objects.get(pk=run["id"]).status == "cancelled")
    assert Run.objects.filter(started_at__gt=begun).count() == 0
    assert lifecycle.violations() == []


def test_lists_are_in_order_though_the_clocks_of_processes_differ(bench, monkeypatch):
    now, main = clock.now, threading.current_thread()
    behind = {"request": 0.0, "worker": 0.3}

    def as_a_process_sees_it() -> Any:
        seconds = behind["request" if threading.current_thread() is main else "worker"]
        return now() - timedelta(seconds=seconds)

    monkeypatch.setattr(clock, "now", as_a_process_sees_it)
    chat = bench.chat()
    first = bench.wait(bench.start("/say First", chat)["id"])
    behind |= {"request": 0.6, "worker": 0.0}
    assert bench.client.patch(f"/api/v1/chats/{chat}", {"title": "Renamed"}, format="json").status_code == 200
    second = bench.wait(bench.start("/say Second", chat)["id"])
    messages = bench.http.get(f"/chats/{chat}/messages").json()["items"]
    assert [message["content"] for message in messages] == ["/say First", "First", "/say Second", "Second"]
    runs = bench.http.get(f"/chats/{chat}/runs").json()["items"]
    assert [run["id"] for run in runs] == [second["id"], first["id"]]
