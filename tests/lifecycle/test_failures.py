"""Tests of the error codes, the budget and the tools of a run, through the API with a real engine."""

import logging
import re
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError
from django.db.models import F

from config.kernel.money import MICRO
from config.queue import publisher
from credits import ledger
from credits.models import LedgerEntry
from runs import catalogue, lifecycle
from runs.models import AgentModel, Provider, Run, Tool
from tests.credits.helpers import fund
from tests.driver import until
from tests.factories import ChatFactory, UserFactory, session_client
from tests.lifecycle.conftest import Bench, joined

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(("message", "code"), [("/fail the model is out", "MODEL_ERROR"), ("/wait 5", "MODEL_TIMEOUT")])
def test_model_errors(bench, settings, message, code):
    settings.MODEL_TIMEOUT_SECONDS = 0.3
    run = bench.finish(message)
    assert (run["status"], run["errorCode"]) == ("failed", code)
    assert run["errorMessage"]
    assert run["finishedAt"]


def test_text_before_a_failure_is_kept(bench, events):
    run = bench.finish("/say half of it\n/fail out")
    assert run["status"] == "failed"
    assert bench.content(run) == joined(events(run["id"])) == "half of it"


def test_run_fails_if_its_completion_cannot_be_written(bench, monkeypatch):
    def refuse(*args, **kwargs):
        raise IntegrityError("never")

    monkeypatch.setattr(lifecycle, "complete", refuse)
    run = bench.finish("Hello")
    assert (run["status"], run["errorCode"]) == ("failed", "INTERNAL_ERROR")


def test_turn_limit(bench, settings):
    settings.RUN_TURN_LIMIT = 2
    run = bench.finish('/call calculate {"expression": "1"}\n/say a\n/call calculate {"expression": "1"}\n/say b')
    assert (run["status"], run["errorCode"]) == ("failed", "TURN_LIMIT_EXCEEDED")


def test_run_timeout(bench, settings):
    settings.RUN_TIMEOUT_SECONDS = 0.5
    run = bench.finish("/say begun\n/wait 20")
    assert (run["status"], run["errorCode"]) == ("failed", "RUN_TIMEOUT")
    assert bench.content(run) == "begun"


def test_credits_run_out_between_turns(bench, user):
    ledger.adjust(user.pk, -99 * MICRO, reason="almost all", staff=UserFactory(is_staff=True))
    run = bench.finish('/usage 0 100000\n/call calculate {"expression": "1"}\n/say never')
    assert (run["status"], run["errorCode"]) == ("failed", "INSUFFICIENT_CREDITS")
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"]) == ("FAILED", "INSUFFICIENT_CREDITS")
    message = r"The next step can cost up to 0\.1 credits; ([0-9.]+) are available\."
    left = re.fullmatch(message, call["errorMessage"])[1]
    assert 0 <= float(left) < 0.01
    ledger.adjust(user.pk, -MICRO, reason="all", staff=UserFactory(is_staff=True))
    refused = bench.client.post(f"/api/v1/chats/{bench.chat()}/runs", {"message": "x"}, format="json")
    assert refused.status_code == 402
    assert refused.json()["error"]["code"] == "INSUFFICIENT_CREDITS"
    assert refused.json()["error"]["details"] == {"available": str(Decimal(left) - 1), "topUpUrl": None}


def test_budget_stops_calls_and_turns(bench):
    run = bench.finish(
        '/usage 0 0\n/call calculate {"expression": "1"}\n/usage 0 0\n/call web_fetch {"url": "http://127.0.0.1:9/"}'
        "\n/usage 1000 0\n/say still here",
        maxCredits=0.6,
    )
    assert [call["errorCode"] for call in run["toolInvocations"]] == [None, "BUDGET_EXCEEDED"]
    assert run["status"] == "completed"
    run = bench.finish('/usage 1000 0\n/call calculate {"expression": "1"}\n/say no', maxCredits=0.5)
    assert (run["status"], run["errorCode"]) == ("failed", "BUDGET_EXCEEDED")


def test_budget_limits_concurrent_calls(bench):
    """All calls of one turn start before the first of them is charged."""
    run = bench.finish("/usage 0 0\n" + '/call calculate {"expression": "1"}\n' * 10 + "/say done", maxCredits=0.75)
    codes = [call["errorCode"] for call in run["toolInvocations"]]
    assert (codes.count(None), codes.count("BUDGET_EXCEEDED")) == (7, 3)
    held = LedgerEntry.objects.filter(run_id=run["id"], type="HOLD", tool_key="calculate")
    assert list(held.values_list("amount", flat=True)) == [100_000] * 7
    assert (run["errorCode"], run["totalCreditsUsed"]) == ("BUDGET_EXCEEDED", 0.7)


def test_price_changes_do_not_affect_earlier_runs(bench):
    script = '/call calculate {"expression": "1"}\n/usage 1000 1000\n/say done'
    first = bench.finish(script)
    before = list(LedgerEntry.objects.filter(run_id=first["id"]).order_by("pk").values())
    Tool.objects.filter(name="calculate").update(price=700_000)
    AgentModel.objects.filter(name="demo").update(price_in=F("price_in") * 3, price_out=F("price_out") * 3)
    catalogue.forget()
    second = bench.finish(script)
    assert list(LedgerEntry.objects.filter(run_id=first["id"]).order_by("pk").values()) == before
    assert bench.get(first["id"])["totalCreditsUsed"] == first["totalCreditsUsed"]

    def prices(run, type):
        return [row.price for row in LedgerEntry.objects.filter(run_id=run["id"], type=type).order_by("pk")]

    assert (prices(first, "CAPTURE"), prices(second, "CAPTURE")) == ([{"perCall": 100_000}], [{"perCall": 700_000}])
    for old, new in zip(prices(first, "USAGE"), prices(second, "USAGE"), strict=True):
        assert (old["in"], old["out"]) == (500_000, 1_500_000)
        assert (new["in"], new["out"]) == (1_500_000, 4_500_000)


def test_budget_is_checked_before_approval_is_requested(bench):
    run = bench.finish('/call draw_chart {"title": "T", "series": [1]}\n/say on', maxCredits=11)
    assert run["status"] == "completed"
    assert run["toolInvocations"][0]["errorCode"] == "BUDGET_EXCEEDED"


def test_failed_tool_does_not_fail_the_run(bench):
    for call, code in (
        ('/call nothing_such {"a": 1}', "UNKNOWN_TOOL"),
        ('/call calculate {"expr": 1}', "INVALID_INPUT"),
        ("/call calculate {oops", "INVALID_INPUT"),
        ('/call calculate {"expression": "1/0"}', "TOOL_ERROR"),
    ):
        run = bench.finish(f"{call}\n/say went on")
        assert run["status"] == "completed", call
        (invocation,) = run["toolInvocations"]
        assert (invocation["status"], invocation["errorCode"]) == ("FAILED", code), call
        assert invocation["creditUsed"] == 0, call
        assert bench.credits()["held"] == "0", call


def tool_row(**columns):
    row = {"display_name": "Find", "description": "Finds.", "node_type": "http", "url": "http://127.0.0.1:9/"}
    return Tool(**{"name": "find", "price": 0, "approval": "never", **row, **columns})


REFUSED_CALLS: list[tuple[str, str, Any]] = [
    ('nothing_such {"a": {"B_c": [1, 0.5]}}', "UNKNOWN_TOOL", {"a": {"B_c": [1, 0.5]}}),
    ("nothing_such {oops", "UNKNOWN_TOOL", {}),
    ('nothing_such ["a"]', "UNKNOWN_TOOL", {}),
    ('calculate {"expr": 1}', "INVALID_INPUT", {"expr": 1}),
    ('calculate {"expression": ["1"]}', "INVALID_INPUT", {"expression": ["1"]}),
    ("calculate {oops", "INVALID_INPUT", {}),
    ('calculate {"a": 1, "a": 2}', "INVALID_INPUT", {}),
    ('calculate {"a": "' + "x" * 72 + '"}', "INVALID_INPUT", {"a": "x" * 72}),
    ('calculate {"a": "' + "x" * 400 + '"}', "INVALID_INPUT", {}),
]


def test_refused_call_keeps_the_arguments_of_the_model(bench, monkeypatch):
    """They are as long as the input of a call may be, so that what is stored is bounded."""
    monkeypatch.setattr("runs.tools.schema.TOOL_INPUT_MAX_CHARS", 100)
    run = bench.finish("".join(f"/call {call}\n" for call, _, _ in REFUSED_CALLS) + "/say went on")
    found = [(invocation["errorCode"], invocation["input"]) for invocation in run["toolInvocations"]]
    assert found == [(code, input) for _, code, input in REFUSED_CALLS]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("pattern", "code"), [("^(a+)+$", "INVALID_INPUT"), ("^(?=a)a+$", "TOOL_ERROR")])
def test_pattern_does_not_stop_the_worker(bench, pattern, code):
    """The first one took 2 ** 60 steps, and the second one is not supported."""
    tool_row(input_schema={"type": "object", "properties": {"q": {"type": "string", "pattern": pattern}}}).save()
    catalogue.refresh()
    run = bench.finish('/call find {"q": "' + "a" * 60 + '!"}\n/say went on')
    assert run["status"] == "completed"
    (call,) = run["toolInvocations"]
    assert (call["errorCode"], pattern in call["errorMessage"]) == (code, True)


@pytest.fixture
def stale(engines, session, settings, monkeypatch):
    """A bench whose worker has read the catalogue and will not do so again by itself. Its list has the reads."""
    reads = []
    monkeypatch.setattr(catalogue, "MAX_AGE_SECONDS", 3600.0)
    monkeypatch.setattr(catalogue, "refresh", lambda read=catalogue.refresh: reads.append(read()) or reads[-1])
    settings.RUN_SWEEP_SECONDS = 600
    bench = Bench(session, engines())
    until(lambda: len(reads) == 2)  # the engine's, and the first of its heartbeat
    reads.clear()
    return bench, reads


def test_worker_looks_up_a_tool_that_it_does_not_know(stale):
    bench, reads = stale
    # As another process adds it: this one receives no signal.
    Tool.objects.bulk_create([tool_row()])
    run = bench.finish('/call find {"q": "x"}\n/say on', tools=["calculate"])
    assert run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL"
    run = bench.finish("/call nothing_such {}\n/say on")
    assert run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL"
    assert reads == []
    run = bench.finish('/call find {"q": "x"}\n/call find {"q": "x"}\n/say on')
    # Nothing listens at the tool's address.
    assert [call["errorCode"] for call in run["toolInvocations"]] == ["TOOL_ERROR"] * 2
    assert len(reads) == 1


def test_tool_that_a_worker_looks_up_still_needs_its_approval(stale):
    bench, reads = stale
    run = bench.ask('/call draw_chart {"title": "T", "series": [1]}\n' * 2 + "/say on")
    Tool.objects.filter(name="draw_chart").update(enabled=False)
    catalogue.refresh()
    Tool.objects.filter(name="draw_chart").update(enabled=True)
    first = run["pendingWaitpoint"]["id"]
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    run = bench.wait(run["id"], "waiting", "completed")
    assert run["status"] == "waiting"
    assert run["pendingWaitpoint"]["id"] != first
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED", "PENDING"]


def test_worker_looks_up_a_model_that_it_does_not_know(stale, monkeypatch):
    bench, reads = stale
    monkeypatch.setattr(publisher, "nudge", lambda *args, **kwargs: None)
    known, unknown = (bench.start("Hello")["id"] for _ in range(2))
    columns = AgentModel.objects.filter(name="demo").values().get() | {"id": None, "name": "fresh", "is_default": False}
    AgentModel.objects.bulk_create([AgentModel(**columns)])
    Run.objects.filter(pk=known).update(requested_model="fresh")
    Run.objects.filter(pk=unknown).update(requested_model="gone")
    for run_id in (known, unknown):
        bench.engine.offer(run_id)
    run = bench.wait(known)
    assert (run["status"], run["resolvedModel"]) == ("completed", "fresh")
    run = bench.wait(unknown)
    assert (run["status"], run["errorCode"]) == ("failed", "MODEL_ERROR")


def test_run_can_limit_its_tools(bench):
    run = bench.finish('/call calculate {"expression": "1"}', tools=["ask_user"])
    assert run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL"


def test_disabled_model_is_refused(bench, session):
    AgentModel.objects.create(
        name="gone",
        display_name="Gone",
        provider=Provider.objects.get(name="demo"),
        provider_model="demo",
        price_in=0,
        price_out=0,
        enabled=False,
    )
    refused = session.post(f"/api/v1/chats/{bench.chat()}/runs", {"message": "x", "model": "gone"}, format="json")
    assert refused.status_code == 400
    assert "model" in refused.json()["error"]["details"]["fields"]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("/fail SECRET words", "MODEL_ERROR, reason model_failed, provider demo, HTTP status -, attempt 1"),
        ("/flaky 401 9 SECRET", "MODEL_ERROR, reason provider_unauthorized, provider demo, HTTP status 401, attempt 1"),
        ("/say SECRET\n/cut", "MODEL_ERROR, reason connection_lost, provider demo, HTTP status -, attempt 2"),
        ("/say SECRET\n/wait 5", "MODEL_TIMEOUT, reason time_out, provider demo, HTTP status -, attempt 1"),
        ("/overflow", "CONTEXT_LENGTH_EXCEEDED, reason context_too_long, provider demo, HTTP status 400, attempt 1"),
        (
            '/usage 0 500\n/call calculate {"expression": "1"}\n/say SECRET',
            "INSUFFICIENT_CREDITS, reason -, provider -, HTTP status -, attempt -",
        ),
    ],
)
def test_a_failed_run_has_one_line_for_staff(bench, user, settings, caplog, message, line, monkeypatch):
    """It says why, and quotes nobody."""
    ledger.adjust(user.pk, -99 * MICRO, reason="almost all", staff=UserFactory(is_staff=True))
    settings.MODEL_ATTEMPTS = 2
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    settings.MODEL_TIMEOUT_SECONDS = 0.3
    run = bench.finish(message)
    until(lambda: f"run {run['id']} failed: " in caplog.text)  # it follows the commit
    (record,) = [
        record for record in caplog.records if record.levelno == logging.WARNING and run["id"] in record.message
    ]
    assert record.message == f"run {run['id']} failed: {line}"
    assert "SECRET" not in caplog.text
    reason = Run.objects.get(pk=run["id"]).failure_reason
    assert f"reason {reason or '-'}," in line


def test_a_run_that_fails_without_a_worker_has_the_line_too(bench, settings, caplog):
    settings.WAITPOINT_EXPIRY_SECONDS = 0.1
    run = bench.ask("/ask Which?")
    run = bench.wait(run["id"])
    until(lambda: f"run {run['id']} failed: WAITPOINT_EXPIRED, reason -" in caplog.text)


def test_completed_and_cancelled_runs_have_no_line(bench, caplog):
    bench.finish("Hello")
    waiting = bench.ask("/ask Which?")
    bench.cancel(waiting["id"])
    assert " failed: " not in caplog.text


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("", None),
        ("https://app.example.com/buy", "https://app.example.com/buy"),
        ("https://app.example.com/buy?user={userId}", "https://app.example.com/buy?user=auth0%7C47%2F11"),
    ],
)
def test_a_402_names_the_page_where_credits_are_sold(settings, template, shown):
    settings.TOP_UP_URL = template
    user = UserFactory(username="auth0|47/11")
    fund(user, 0)
    chat = ChatFactory(user=user)
    answer = session_client(user).post(f"/api/v1/chats/{chat.pk}/runs", {"message": "Hello"}, format="json")
    assert answer.status_code == 402
    assert answer.json()["error"]["details"] == {"available": "0", "topUpUrl": shown}
