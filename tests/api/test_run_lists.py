"""Tests of the sizes of runs: lists hold summaries without calls, and a run shows the beginning of each result."""

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.llm.base import ERROR_MESSAGE_MAX_CHARS
from runs.models import Run, ToolInvocation, Waitpoint
from tests import factories

pytestmark = pytest.mark.django_db

CALLS = 20
PAGE = 100
PAGE_MAX_BYTES = 300_000


@pytest.fixture
def chat(user):
    return factories.ChatFactory(user=user)


def runs_with_calls(chat: Any, number: int) -> list[Run]:
    runs = factories.RunFactory.create_batch(
        number, chat=chat, tool_invocation_count=CALLS, error_code="MODEL_ERROR", error_message="x" * 200
    )
    ToolInvocation.objects.bulk_create(
        factories.ToolInvocationFactory.build(run=run, call_index=index, input={"text": "x" * 1000}, result="x" * 9000)
        for run in runs
        for index in range(1, CALLS + 1)
    )
    return runs


def paths(chat: Any) -> list[str]:
    return [f"/runs?limit={PAGE}", f"/chats/{chat.pk}/runs?limit={PAGE}"]


def test_a_page_of_runs_with_many_calls_is_small(session, public, chat):
    runs_with_calls(chat, PAGE)
    for path in paths(chat):
        for answer in (session.get(f"/api/v1{path}"), public.get(f"/api/public/v1{path}")):
            items = answer.json()["items"]
            assert [item["toolInvocationCount"] for item in items] == [CALLS] * PAGE
            assert len(answer.content) <= PAGE_MAX_BYTES


def test_the_number_of_queries_of_a_page_depends_on_neither_runs_nor_calls(session, chat):
    def queries(path: str) -> int:
        with CaptureQueriesContext(connection) as captured:
            assert session.get(f"/api/v1{path}").status_code == 200
        return len(captured)

    runs_with_calls(chat, 1)
    before = [queries(path) for path in paths(chat)]
    runs_with_calls(chat, 20)
    assert [queries(path) for path in paths(chat)] == before


def test_a_summary_has_every_field_of_a_run_but_its_calls(session, chat):
    (run,) = runs_with_calls(chat, 1)
    (summary,) = session.get("/api/v1/runs").json()["items"]
    whole = session.get(f"/api/v1/runs/{run.pk}").json()
    assert len(whole.pop("toolInvocations")) == summary.pop("toolInvocationCount") == CALLS
    assert (whole.pop("answer"), whole.pop("output")) == (None, None)
    assert summary == whole


@pytest.mark.parametrize("answered_first", [False, True])
def test_a_run_that_a_list_shows_as_waiting_has_its_waitpoint(session, chat, answered_first):
    run = factories.RunFactory(chat=chat, status="waiting")
    asked = factories.WaitpointFactory(run=run)

    def answer(execute, sql, *given):
        if f'FROM "{Waitpoint._meta.db_table}"' in sql and answered_first:  # the runs were read before
            factories.force_update(Waitpoint.objects.filter(pk=asked.pk), status="COMPLETED")
        return execute(sql, *given)

    with connection.execute_wrapper(answer):
        (item,) = session.get("/api/v1/runs?status=waiting").json()["items"]
    shown = item["pendingWaitpoint"]
    assert (item["status"], shown and shown["id"]) == ("waiting", asked.pk)


@pytest.mark.parametrize(("characters", "shown"), [(8000, True), (8192, False), (200_000, False)])
def test_a_list_leaves_out_a_long_input_that_waits_for_an_approval(session, chat, characters, shown):
    run, input = factories.RunFactory(chat=chat, status="waiting"), {"text": "x" * characters}
    payload = {"toolName": "lookup", "estimatedMicro": 1, "thresholdMicro": 0, "toolInvocationId": "inv_1"}
    waitpoint = factories.WaitpointFactory(run=run, kind="CREDIT_APPROVAL", request_payload=payload | {"input": input})
    (summary,) = session.get("/api/v1/runs").json()["items"]
    whole = session.get(f"/api/v1/runs/{run.pk}").json()
    assert summary["pendingWaitpoint"]["requestPayload"]["input"] == (input if shown else None)
    assert whole["pendingWaitpoint"]["requestPayload"]["input"] == input
    assert session.get(f"/api/v1/waitpoints/{waitpoint.pk}").json() == whole["pendingWaitpoint"]


def test_the_largest_summary_is_bounded(session, chat):
    """The model's question is the largest part: its schema limits it."""
    question = {"question": "x" * 10_000, "options": ["x" * 500] * 20}
    run = factories.RunFactory(chat=chat, status="waiting", error_message="x" * ERROR_MESSAGE_MAX_CHARS)
    factories.WaitpointFactory(run=run, request_payload=question)
    answer = session.get("/api/v1/runs")
    assert answer.json()["items"][0]["pendingWaitpoint"]["requestPayload"] == question
    assert len(answer.content) < 25_000


@pytest.mark.parametrize(
    ("result", "shown", "truncated"),
    [
        ("", "", False),
        ("short", "short", False),
        ("x" * 8192, "x" * 8192, False),
        ("x" * 8193, "x" * 8192, True),
        ("€" * 2730, "€" * 2730, False),
        ("€" * 2731, "€" * 2730, True),  # never a part of a character
        ("x" * 100_000, "x" * 8192, True),
    ],
)
def test_a_run_shows_the_first_8_kib_of_a_result(session, chat, result, shown, truncated):
    run = factories.RunFactory(chat=chat)
    factories.ToolInvocationFactory(run=run, result=result)
    (call,) = session.get(f"/api/v1/runs/{run.pk}").json()["toolInvocations"]
    assert (call["result"], call["resultTruncated"]) == (shown, truncated)


@pytest.mark.parametrize(
    ("result", "urls", "shown", "truncated"),
    [
        ("made https://a/1", ["https://a/1", "https://a/2"], "made https://a/1\nhttps://a/2", False),
        ("", ["https://a/1"], "\nhttps://a/1", False),
        ("x" * 8181, ["u" * 10], "x" * 8181 + "\n" + "u" * 10, False),
        ("x" * 8182, ["u" * 10], "x" * 8182 + "\n" + "u" * 9, True),
        ("x" * 8192 + "u", ["u"], "x" * 8192, True),
    ],
)
def test_a_result_has_the_addresses_that_the_model_was_told(session, chat, result, urls, shown, truncated):
    run = factories.RunFactory(chat=chat)
    factories.ToolInvocationFactory(run=run, result=result, result_urls=urls)
    (call,) = session.get(f"/api/v1/runs/{run.pk}").json()["toolInvocations"]
    assert (call["result"], call["resultTruncated"]) == (shown, truncated)


def test_a_call_without_a_result_shows_none(session, chat):
    run = factories.RunFactory(chat=chat)
    factories.ToolInvocationFactory(run=run, status="FAILED", error_code="TOOL_ERROR", error_message="no")
    (call,) = session.get(f"/api/v1/runs/{run.pk}").json()["toolInvocations"]
    assert (call["result"], call["resultTruncated"]) == (None, False)


def test_the_calls_of_a_run_without_calls_are_not_read(session, chat, django_assert_num_queries):
    run = factories.RunFactory(chat=chat)
    path = f"/api/v1/runs/{run.pk}"
    session.get(path)
    with django_assert_num_queries(1):  # the run with its user
        assert session.get(path).json()["toolInvocations"] == []
    call = factories.ToolInvocationFactory(run=run)
    with django_assert_num_queries(2):
        assert [shown["id"] for shown in session.get(path).json()["toolInvocations"]] == [call.pk]


def test_a_run_with_a_thousand_calls_is_shown_by_few_queries(session, chat):
    run = factories.RunFactory(chat=chat, tool_invocation_count=1000)
    ToolInvocation.objects.bulk_create(
        factories.ToolInvocationFactory.build(run=run, call_index=index, result="x" * 100_000) for index in range(1000)
    )
    session.get(f"/api/v1/runs/{run.pk}")
    with CaptureQueriesContext(connection) as captured:
        answer = session.get(f"/api/v1/runs/{run.pk}")
    assert len(answer.json()["toolInvocations"]) == 1000
    assert len(captured) <= 4
    assert len(answer.content) < 10_000_000
