"""Tests of single answers of the stream endpoint: permissions, start index, and streams of ended runs."""

import json
from datetime import timedelta
from typing import Any

import pytest
from rest_framework.test import APIClient

from config.kernel import clock
from config.kernel.errors import RateLimited
from runs import purge
from runs.models import Run, RunEvent
from runs.streams import reads, views
from tests import factories
from tests.streams.conftest import append, finish, parse, text_of

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["session", "public"])
def client(request, user) -> APIClient:
    return getattr(factories, f"{request.param}_client")(user)


@pytest.fixture
def base(client) -> str:
    key = client._credentials["HTTP_AUTHORIZATION"].startswith("Bearer awk_")
    return "/api/public/v1" if key else "/api/v1"


def body(answer) -> bytes:
    assert answer.status_code == 200, answer.content
    return b"".join(answer.streaming_content)


@pytest.fixture
def listen(client, base):
    def get(run: Run, query: str = "", **headers):
        return parse(body(client.get(f"{base}/runs/{run.pk}/stream{query}", headers=headers)))

    return get


def test_stream_of_a_finished_run_has_all_its_events(listen, make_run, user):
    run = make_run(user)
    finish(run, "Hello ", "wörld 🦊\u2028\u2029\x85\n\r\n")
    received = listen(run)
    assert [index for index, *_ in received] == [1, 2, 3, 4, 5, 6]
    assert received[-1][1:] == ("run.status", received[-1][2])
    assert received[-1][2]["status"] == "completed"
    assert text_of(received) == received[-2][2]["content"] == "Hello wörld 🦊\u2028\u2029\x85\n\r\n"


@pytest.mark.parametrize(
    ("query", "header", "first"),
    [
        ("", None, 1),
        ("?after=0", None, 1),
        ("?after=2", None, 3),
        ("?after=2", "3", 4),  # an EventSource that reconnects sends the same query again
        ("", "5", 6),
        ("?after=6", None, None),
        ("?after=7", None, None),
        ("?after=999999999999999999", None, None),
    ],
)
def test_stream_starts_after_the_given_index(listen, make_run, user, query, header, first):
    run = make_run(user)
    finish(run, "a", "b")
    received = listen(run, query, **({} if header is None else {"Last-Event-ID": header}))
    assert [index for index, *_ in received] == (list(range(first, 7)) if first else [])


@pytest.mark.parametrize("index", ["6", "7", "999999999999999999"])
def test_a_reconnection_past_the_end_of_a_finished_run_is_204(client, base, make_run, user, index):
    run = make_run(user)
    append(run, *(("message.delta", {"text": "a"}),) * 2)
    live = client.get(f"{base}/runs/{run.pk}/stream", headers={"Last-Event-ID": index})
    assert live.status_code == 200
    finish(run, "b")
    assert run.last_stream_index == 7
    expected = 200 if index == "6" else 204
    for method in (client.get, client.head):
        answer = method(f"{base}/runs/{run.pk}/stream", headers={"Last-Event-ID": index})
        assert answer.status_code == expected
    if expected == 204:
        answer = client.get(f"{base}/runs/{run.pk}/stream?after=1", headers={"Last-Event-ID": index})
        assert (answer.status_code, answer.content) == (204, b"")
        assert "Content-Type" not in answer
        assert answer["X-Request-Id"]
    # The query is the client's own question, not a reconnection.
    assert client.get(f"{base}/runs/{run.pk}/stream?after={index}").status_code == 200


@pytest.mark.parametrize("wrong", ["", "-1", "1.5", "x", "1e3", "٣", "1" * 19, "1,2"])
def test_a_malformed_index_is_refused(client, base, make_run, user, wrong):
    run = make_run(user)
    for answer, field in (
        (client.get(f"{base}/runs/{run.pk}/stream", {"after": wrong}), "after"),
        (client.get(f"{base}/runs/{run.pk}/stream", headers={"Last-Event-ID": wrong.encode()}), "Last-Event-ID"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "VALIDATION_ERROR"
        assert list(answer.json()["error"]["details"]["fields"]) == [field]


def test_a_refused_stream_is_readable_by_web_apps(client, base, make_run, user, settings, monkeypatch):
    settings.CORS_ALLOWED_ORIGINS = ["https://app.example.com"]
    run = make_run(user)
    finish(run)

    def refuse(user_id: int, limit: int) -> Any:
        raise RateLimited

    monkeypatch.setattr(views.places, "take", refuse)
    refusal = client.get(f"{base}/runs/{run.pk}/stream", headers={"Origin": "https://app.example.com"})
    assert (refusal.status_code, refusal["Access-Control-Allow-Origin"]) == (429, "https://app.example.com")
    assert refusal["X-Request-Id"]
    assert "origin" in refusal["Vary"].lower()


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "image/png", "*/*", "nonsense"])
def test_every_accept_header_is_allowed(client, base, make_run, user, accept):
    run = make_run(user)
    finish(run)
    answer = client.get(f"{base}/runs/{run.pk}/stream", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer["Content-Type"] == "text/event-stream"
    assert answer["Cache-Control"] == "no-store"
    assert answer["X-Accel-Buffering"] == "no"
    assert answer["X-Request-Id"]
    assert answer["X-RateLimit-Limit"]


def test_errors_use_the_error_envelope(client, base, make_run, user):
    foreign = make_run(factories.UserFactory())
    deleted = make_run(user)
    deleted.chat.deleted_at = clock.now()
    deleted.chat.save()
    for run_id in (foreign.pk, deleted.pk, "run_x", "%00", "x" * 10_000):
        answer = client.get(f"{base}/runs/{run_id}/stream", headers={"Accept": "text/event-stream"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
    answer = APIClient().get(f"{base}/runs/{foreign.pk}/stream", headers={"Accept": "text/event-stream"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHORIZED")
    assert answer["WWW-Authenticate"] == "Bearer"
    answer = client.post(f"{base}/runs/{foreign.pk}/stream", {}, format="json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")


def test_head_answers_without_a_body(client, base, make_run, user):
    run = make_run(user)
    answer = client.head(f"{base}/runs/{run.pk}/stream")
    assert answer.status_code == 200
    assert answer["Content-Type"] == "text/event-stream"
    assert answer.content == b""


def test_opening_takes_few_queries(session, make_run, user, django_assert_max_num_queries):
    run = make_run(user)
    with django_assert_max_num_queries(2):
        session.get(f"/api/v1/runs/{run.pk}/stream")


def test_long_stream_is_read_in_pages(listen, make_run, user):
    run = make_run(user)
    finish(run, *["word "] * (2 * reads.PAGE_EVENTS + 7))
    received = listen(run)
    assert [index for index, *_ in received] == list(range(1, run.last_stream_index + 1))


# --- pruned ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(make_run, user) -> Run:
    """A finished run with the events 1 to 7 whose retention time is over."""
    run = make_run(user, days=31)
    finish(run, "Hello ", "you ", "there")
    Run.objects.filter(pk=run.pk).update(finished_at=clock.now() - timedelta(days=30, minutes=1))
    return run


def test_pruning_deletes_only_events_of_old_runs(old, make_run, user, monkeypatch):
    monkeypatch.setattr(purge, "RUNS_BATCH", 2)
    recent, live = make_run(user, days=40), make_run(user, days=40)
    finish(recent, "x")
    Run.objects.filter(pk=recent.pk).update(finished_at=clock.now() - timedelta(days=29, hours=23))
    more = [make_run(user, days=32) for _ in range(4)]
    for run in more:
        finish(run)
        Run.objects.filter(pk=run.pk).update(finished_at=clock.now() - timedelta(days=31))
    assert purge.prune_events() > 0
    assert set(RunEvent.objects.values_list("run_id", flat=True)) == {recent.pk, live.pk}
    assert purge.prune_events() == 0


def test_a_pruned_stream_is_rebuilt_from_the_run(listen, old):
    whole = listen(old)
    purge.prune_events()
    received = listen(old)
    assert [(index, kind) for index, kind, _ in received] == [
        (5, "message.delta"),
        (6, "message.completed"),
        (7, "run.status"),
    ]
    assert text_of(received) == text_of(whole) == "Hello you there"
    assert received[1:2] == whole[-2:-1]
    assert {name: received[2][2][name] for name in ("runId", "chatId", "status")} == {
        "runId": old.pk,
        "chatId": old.chat_id,
        "status": "completed",
    }


@pytest.mark.parametrize("after", range(8))
def test_client_with_some_events_gets_the_rest_of_a_pruned_stream(listen, old, after):
    had = listen(old)[:after]
    purge.prune_events()
    received = listen(old, f"?after={after}")
    assert text_of(had + received) == "Hello you there"
    indexes = [index for index, *_ in had + received if index]
    assert indexes == sorted(set(indexes))
    assert not indexes or indexes[-1] == 7


def test_pruned_stream_of_a_failed_run_has_the_error(listen, make_run, user):
    run = make_run(user, days=32)
    append(run, ("run.status", {"status": "failed"}), status="failed")
    Run.objects.filter(pk=run.pk).update(
        finished_at=clock.now() - timedelta(days=31), error_code="MODEL_ERROR", error_message="It broke."
    )
    purge.prune_events()
    ((index, kind, data),) = listen(run)
    assert (index, kind, data["errorCode"], data["errorMessage"]) == (3, "run.status", "MODEL_ERROR", "It broke.")


# --- schema ----------------------------------------------------------------------------------------------------------


def test_schema_describes_the_stream(session):
    paths = json.loads(session.get("/api/schema", headers={"Accept": "application/json"}).content)["paths"]
    for path in ("/api/v1/runs/{runId}/stream", "/api/public/v1/runs/{runId}/stream"):
        operation = paths[path]["get"]
        assert list(operation["responses"]["200"]["content"]) == ["text/event-stream"]
        assert {"after", "Last-Event-ID", "runId"} == {parameter["name"] for parameter in operation["parameters"]}
        assert "406" not in operation["responses"]
