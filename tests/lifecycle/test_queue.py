"""Tests of the runs that are queued behind a chat's active run: their number, and their end with the chat."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from config.kernel import clock
from runs import lifecycle
from runs.models import Run, RunEvent
from tests import factories
from tests.driver import until
from tests.lifecycle.conftest import seed_catalogue
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db(transaction=True)

HELD = '/usage 0 0\n/call draw_chart {"title": "T", "series": [1]}'


@pytest.fixture(autouse=True)
def catalogue_rows(transactional_db):
    seed_catalogue()


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
    assert bench.credits() == {"balance": "100", "held": "0", "available": "100"}
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
