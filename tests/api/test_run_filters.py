"""The metadata of runs, and the filters of run lists: alone, together and over pages (docs/resources.md)."""

from datetime import timedelta
from itertools import product
from random import Random
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from chats.services import make_chat
from config.kernel import clock
from runs.models import Run, RunMetadata
from tests import factories

pytestmark = pytest.mark.django_db

LONGEST = {f"{'k' * 62}{n:02}": "🦊" * 512 for n in range(16)}


def start(client: Any, chat: str, surface: str = "/api/v1", **body: Any) -> Any:
    body = {"message": "Hello", "onActiveRun": "enqueue"} | body
    return client.post(f"{surface}/chats/{chat}/runs", body, format="json")


def make(user: Any, **columns: Any) -> Run:
    """A run with its pairs."""
    columns = {"chat": factories.ChatFactory(user=user), "created_at": clock.now()} | columns
    run = factories.RunFactory(**columns)
    for key, value in run.metadata.items():
        RunMetadata.objects.create(run=run, user=run.user, key=key, value=value, created_at=run.created_at)
    return run


def listed(client: Any, path: str = "/runs", surface: str = "/api/v1", **query: str | list[str]) -> list[str]:
    """The ids of all pages, read two at a time."""
    found, cursor = [], {}
    while True:
        answer = client.get(f"{surface}{path}?{urlencode({'limit': '2'} | query | cursor, doseq=True)}")
        assert answer.status_code == 200, answer.content
        found += [item["id"] for item in answer.json()["items"]]
        if (after := answer.json()["nextCursor"]) is None:
            return found
        cursor = {"cursor": after}


def problem(client: Any, query: str) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "VALIDATION_ERROR")
    fields: dict[str, Any] = answer.json()["error"]["details"]["fields"]
    return fields


def test_metadata_is_given_back_as_it_came(session, public, user):
    chat = make_chat(user)[0].pk
    for given in ({"customer": "c-42", "A.b_c-1": ""}, LONGEST):
        run = start(session, chat, metadata=given).json()
        assert run["metadata"] == given
        assert public.get(f"/api/public/v1/runs/{run['id']}").json()["metadata"] == given
        key, value = next(iter(given.items()))
        assert listed(session, **{f"metadata.{key}": value}) == [run["id"]]
    assert start(public, chat, "/api/public/v1").json()["metadata"] == {}
    assert start(session, chat, metadata=None).json()["metadata"] == {}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({str(n): "" for n in range(17)}, "metadata"),
        ([], "metadata"),
        ({"k" * 65: ""}, f"metadata.{'k' * 64}"),
        ({"ä": ""}, "metadata.ä"),
        ({"": ""}, "metadata."),
        ({"n": 1}, "metadata.n"),
        ({"n": None}, "metadata.n"),
        ({"n": {}}, "metadata.n"),
        ({"n": "x" * 513}, "metadata.n"),
    ],
)
def test_other_metadata_is_refused(session, user, given, field):
    answer = start(session, make_chat(user)[0].pk, metadata=given)
    assert answer.status_code == 400
    assert list(answer.json()["error"]["details"]["fields"]) == [field]


def test_a_filter_leaves_the_runs_that_match_it(session, public, user):
    plain = make(user)
    failed = make(user, status="failed", resolved_model="large", metadata={"customer": "1", "env": "test"})
    waiting = make(user, status="waiting", resolved_model="demo", metadata={"customer": "1", "env": "prod"})
    other = make(user, resolved_model="demo", metadata={"customer": "2", "env": "prod"})
    make(factories.UserFactory(), status="failed", resolved_model="large", metadata={"customer": "1"})
    for query, expected in [
        ({}, [other, waiting, failed, plain]),
        ({"status": "failed"}, [failed]),
        ({"status": "failed,waiting,completed"}, [other, waiting, failed, plain]),
        ({"status": "waiting,failed"}, [waiting, failed]),
        ({"status": "queued"}, []),
        ({"status": ["failed", "waiting"]}, [waiting, failed]),
        ({"model": "demo"}, [other, waiting]),
        ({"metadata.customer": "1"}, [waiting, failed]),
        ({"metadata.customer": "1", "metadata.env": "prod"}, [waiting]),
        ({"metadata.customer": "3"}, []),
        ({"metadata.nothing": ""}, []),
        ({"metadata.env": "prod", "status": "completed,waiting", "model": "demo"}, [other, waiting]),
        ({"metadata.env": "prod", "status": "failed"}, []),
    ]:
        assert listed(session, **query) == [run.pk for run in expected], query
        assert listed(public, surface="/api/public/v1", **query) == [run.pk for run in expected], query
    path = f"/chats/{waiting.chat_id}/runs"
    assert listed(session, path, **{"metadata.customer": "1"}) == [waiting.pk]
    assert listed(session, path, status="failed,completed") == []


def test_filters_hold_on_every_page(session, user):
    chat = factories.ChatFactory(user=user)
    at = clock.now()
    made = [
        # Pairs of runs at the same time, whose order is that of their ids.
        make(
            user,
            chat=chat,
            created_at=at + timedelta(seconds=n // 2),
            status="failed" if n % 3 else "completed",
            metadata={"third": str(n % 3)},
        )
        for n in range(20)
    ]
    newest = list(reversed(made))
    assert listed(session, status="failed,completed") == [run.pk for run in newest]
    for third in ("0", "1", "2"):
        expected = [run.pk for run in newest if run.metadata["third"] == third]
        assert listed(session, **{"metadata.third": third}) == expected
        assert listed(session, **{"metadata.third": third, "status": "failed,completed"}) == expected


def test_a_run_has_the_requested_model_until_it_first_executes(session, user):
    queued = make(user, status="queued", requested_model="large")
    fallback = make(user, requested_model="large", resolved_model="demo")
    default = make(user, resolved_model="large", metadata={"a": "b"})
    make(user, status="queued")
    assert listed(session, model="large") == [default.pk, queued.pk]
    assert listed(session, model="demo") == [fallback.pk]
    assert listed(session, model="large", status="queued") == [queued.pk]
    assert listed(session, model="large", **{"metadata.a": "b"}) == [default.pk]


def test_every_combination_of_filters(session, user):
    numbers, at = Random(7), clock.now()
    chats = factories.ChatFactory.create_batch(2, user=user)
    made = [
        make(
            user,
            chat=numbers.choice(chats),
            created_at=at + timedelta(seconds=numbers.randrange(12)),
            status=numbers.choice(["completed", "failed", "cancelled"]),
            resolved_model=numbers.choice(["demo", "large"]),
            metadata={"a": numbers.choice("12"), "b": "1" if n % 3 == 0 else "2"},
        )
        for n in range(18)
    ]
    made.sort(key=lambda run: (run.created_at, run.pk), reverse=True)
    choices = [(None, "failed", "completed,cancelled"), (None, "large"), (None, "1"), (None, "1")]
    for status, model, a, b in product(*choices):
        query = {"status": status, "model": model, "metadata.a": a, "metadata.b": b}
        query = {name: value for name, value in query.items() if value is not None}
        expected = [
            run
            for run in made
            if (status is None or run.status in status)
            and model in (None, run.resolved_model)
            and a in (None, run.metadata["a"])
            and b in (None, run.metadata["b"])
        ]
        assert listed(session, **query) == [run.pk for run in expected], query
        of_chat = [run.pk for run in expected if run.chat_id == chats[0].pk]
        assert listed(session, f"/chats/{chats[0].pk}/runs", **query) == of_chat, query


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite has no time limit for statements")
def test_filters_that_take_too_long_are_refused(session, user, monkeypatch):
    monkeypatch.setattr("runs.filters.SECONDS", 0.05)

    def slow(execute: Any, sql: str, parameters: Any, *arguments: Any) -> Any:
        return (
            execute("SELECT pg_sleep(10)", (), *arguments)
            if "runs_run" in sql
            else execute(sql, parameters, *arguments)
        )

    with connection.execute_wrapper(slow):
        assert list(problem(session, "status=failed&metadata.a=1")) == ["filters"]
    assert session.get("/api/v1/runs?status=failed").status_code == 200


def test_times_are_compared_as_they_are_shown(session, user):
    """To the millisecond: neither bound includes the run whose ``createdAt`` it is."""
    at = clock.now().replace(microsecond=500_400)
    made = [make(user, created_at=at + timedelta(milliseconds=n), metadata={"a": "b"}) for n in range(-1, 2)]
    shown = session.get(f"/api/v1/runs/{made[1].pk}").json()["createdAt"]
    for more in ({}, {"metadata.a": "b"}, {"status": "completed,failed"}):
        assert listed(session, createdAfter=shown, **more) == [made[2].pk]
        assert listed(session, createdBefore=shown, **more) == [made[0].pk]
    offset = (at - timedelta(milliseconds=2)).astimezone().isoformat()
    assert listed(session, createdAfter=offset, createdBefore=shown) == [made[0].pk]


@pytest.mark.parametrize("time", ["0300-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z"])
def test_no_time_is_too_early_or_too_late(session, user, time):
    """``createdAfter`` the last millisecond is no overflow, and SQLite compares the year 300 as text."""
    run, is_past = make(user, metadata={"a": "b"}), time < "2"
    for more in ({}, {"metadata.a": "b"}):
        assert listed(session, createdAfter=time, **more) == ([run.pk] if is_past else [])
        assert listed(session, createdBefore=time, **more) == ([] if is_past else [run.pk])


@pytest.mark.parametrize("more", [{}, {"metadata.a": "b"}])
def test_one_statement_finds_the_runs(session, user, more):
    """So a run that moves from one status of the filter to another meanwhile is listed once."""
    make(user, status="waiting", metadata={"a": "b"})
    with CaptureQueriesContext(connection) as asked:
        session.get(f"/api/v1/runs?{urlencode({'status': 'queued,waiting'} | more)}")
    assert sum("runs_run" in query["sql"] for query in asked.captured_queries) == 1


NO_FILTERS = [
    ("status=", "status"),
    ("status=nothing", "status"),
    ("status=failed,", "status"),
    ("status=failed, completed", "status"),
    ("model=", "model"),
    ("model=%00", "model"),
    (f"model={'x' * 101}", "model"),
    ("createdAfter=", "createdAfter"),
    ("createdAfter=yesterday", "createdAfter"),
    ("createdAfter=2026-11-20T12:34:56", "createdAfter"),
    ("createdBefore=0001-01-01T00:00:00%2B23:59", "createdBefore"),
    ("metadata=1", "metadata"),
    ("metadata.=1", "metadata."),
    ("metadata.%C3%A4=1", "metadata.ä"),
    ("metadata[customer]=1", "metadata[customer]"),
    ("metadatacustomer=1", "metadatacustomer"),
    (f"metadata.{'k' * 65}=1", f"metadata.{'k' * 65}"),
    ("metadata.a=1&metadata.a=1", "metadata.a"),
    ("metadata.a=%00", "metadata.a"),
    (f"metadata.a={'x' * 513}", "metadata.a"),
    ("&".join(f"metadata.{n}=1" for n in range(17)), "metadata"),
    ("metadata.a=1&cursor=abc", "cursor"),
    ("status=failed,completed&limit=0", "limit"),
]


def test_what_is_no_filter_is_refused(session, subtests):
    for query, field in NO_FILTERS:
        with subtests.test(query[:100]):
            assert list(problem(session, query)) == [field]


def test_every_problem_is_named(session):
    assert set(problem(session, f"status=x&metadata.{quote('ü')}=1&model=")) == {"status", "metadata.ü", "model"}
