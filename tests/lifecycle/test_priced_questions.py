"""Tests of a price on ``ask_user``: the question is approved, held and charged like any other call."""

from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from credits.models import LedgerEntry
from runs import catalogue, lifecycle
from runs.models import Tool
from tests.driver import until
from tests.lifecycle.conftest import Bench, vanish
from tests.tiers import slow

pytestmark = pytest.mark.django_db(transaction=True)

FREE = "/usage 0 0\n"
ASK = f"{FREE}/ask Which?\n{FREE}/say {{result}} it is"


def price(credits: int) -> None:
    Tool.objects.filter(name="ask_user").update(price=credits * 1_000_000)
    catalogue.forget()


def call_of(run: dict[str, Any]) -> tuple[str, str | None, float]:
    (call,) = run["toolInvocations"]
    return call["status"], call["errorCode"], call["creditUsed"]


def approve(bench: Bench, run: dict[str, Any], approved: bool = True) -> dict[str, Any]:
    assert run["pendingWaitpoint"]["kind"] == "CREDIT_APPROVAL"
    bench.respond(run, kind="CREDIT_APPROVAL", approved=approved)
    return bench.wait(run["id"], "waiting", "completed", "failed")


def answer(bench: Bench, run: dict[str, Any]) -> dict[str, Any]:
    assert run["pendingWaitpoint"]["kind"] == "CLARIFICATION"
    bench.respond(run, kind="CLARIFICATION", answer="blue")
    return bench.wait(run["id"], "waiting", "completed", "failed")


def check(bench: Bench, balance: str) -> None:
    assert bench.credits() == {"balance": balance, "held": "0", "available": balance, "expiring": []}
    assert lifecycle.violations() == []
    call_command("reconcile_credits", stdout=StringIO())


def test_an_answered_question_is_charged_once(bench):
    price(2)
    run = bench.ask(ASK)
    assert bench.credits()["held"] == "0"
    run = answer(bench, run)
    assert bench.content(run) == "blue it is"
    assert call_of(run) == ("COMPLETED", None, 2)
    assert run["totalCreditsUsed"] == 2
    entries = LedgerEntry.objects.filter(invocation_id=run["toolInvocations"][0]["id"])
    assert sorted(entries.values_list("type", "amount")) == [("CAPTURE", 2_000_000), ("HOLD", 2_000_000)]
    check(bench, "98")


def test_a_question_over_the_threshold_is_approved_before_it_is_asked(bench):
    price(12)
    run = bench.ask(ASK, maxCredits=13)
    assert run["pendingWaitpoint"]["requestPayload"] == {
        "toolName": "ask_user",
        "estimatedCredits": 12,
        "threshold": 10,
        "toolInvocationId": run["toolInvocations"][0]["id"],
        "input": {"question": "Which?"},
    }
    run = approve(bench, run)
    assert run["pendingWaitpoint"]["requestPayload"] == {"question": "Which?"}
    assert bench.credits()["held"] == "12"
    run = answer(bench, run)
    assert bench.content(run) == "blue it is"
    assert call_of(run) == ("COMPLETED", None, 12)
    check(bench, "88")


def test_a_refused_question_is_not_asked_and_costs_nothing(bench):
    price(12)
    run = approve(bench, bench.ask(ASK), approved=False)
    assert run["status"] == "completed"
    assert call_of(run) == ("REFUSED", "APPROVAL_REFUSED", 0)
    check(bench, "100")


def test_a_question_over_the_budget_is_not_asked(bench):
    price(2)
    run = bench.finish(ASK, maxCredits=1)
    assert call_of(run) == ("FAILED", "BUDGET_EXCEEDED", 0)
    check(bench, "100")


def test_a_question_that_the_credits_do_not_cover_fails(bench):
    price(60)
    run = bench.ask(
        f'{FREE}/call ask_user {{"question": "a"}}\n/call ask_user {{"question": "b"}}\n{FREE}/say on',
        creditApprovalThreshold=100,
    )
    run = answer(bench, answer(bench, run))
    assert run["status"] == "completed"
    first, second = run["toolInvocations"]
    assert (first["status"], first["creditUsed"]) == ("COMPLETED", 60)
    assert (second["status"], second["errorCode"], second["creditUsed"]) == ("FAILED", "INSUFFICIENT_CREDITS", 0)
    check(bench, "40")


def test_the_hold_of_an_approved_question_is_released_by_a_cancellation(bench):
    price(12)
    run = approve(bench, bench.ask(ASK))
    assert bench.credits()["held"] == "12"
    assert bench.cancel(run["id"])["status"] == "cancelled"
    check(bench, "100")


@pytest.mark.parametrize("credits", [*slow(2), 12])
def test_a_worker_that_dies_before_the_result_charges_nothing_twice(bench, engines, monkeypatch, credits):
    price(credits)
    run = bench.ask(ASK)
    if credits == 12:
        run = approve(bench, run)
    record, lost = lifecycle.record_call_result, []

    def die(*args: Any, **kwargs: Any) -> Any:
        lost.append(args)
        raise lifecycle.LeaseLost

    monkeypatch.setattr(lifecycle, "record_call_result", die)
    bench.respond(run, kind="CLARIFICATION", answer="blue")
    until(lambda: lost)
    vanish(bench.engine)
    assert bench.credits()["held"] == str(credits)
    monkeypatch.setattr(lifecycle, "record_call_result", record)
    engines()
    run = bench.wait(run["id"])
    assert bench.content(run) == "blue it is"
    assert call_of(run) == ("COMPLETED", None, credits)
    check(bench, str(100 - credits))
