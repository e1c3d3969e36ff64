"""A spending limit that nothing exceeds, and no usage that is free."""

from typing import Any

import pytest

from config.kernel.money import MICRO
from credits import ledger
from credits.models import Account, LedgerEntry
from runs import catalogue, lifecycle, services
from runs.lifecycle.moves import changed
from runs.models import AgentModel, Run, Turn
from tests.driver import until
from tests.factories import ChatFactory, ToolInvocationFactory, UserFactory
from tests.lifecycle.conftest import vanish

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("laws")]


def set_available(user: Any, credits: float) -> None:
    change = round(credits * MICRO) - ledger.account_for(user.pk).available
    if change:
        ledger.adjust(user.pk, change, reason="for the test", staff=UserFactory(is_staff=True))


def rows(run: dict[str, Any]) -> list[tuple[str, int]]:
    found = LedgerEntry.objects.filter(run_id=run["id"]).order_by("created_at", "id")
    return list(found.values_list("type", "amount"))


def usage(run: dict[str, Any]) -> LedgerEntry:
    return LedgerEntry.objects.get(run_id=run["id"], type="USAGE")


def test_a_turn_is_held_for_and_settled(bench):
    run = bench.finish("/usage 1000 2000\n/say ok")
    held = 4 * 500 + 4096 * 1500  # by the characters of the message, and the output limit
    (hold, amount), *settled = rows(run)
    assert (hold, abs(amount - held) < 10_000) == ("HOLD", True)
    assert sorted(settled) == [("RELEASE", amount - 3_500_000), ("USAGE", 3_500_000)]
    assert run["totalCreditsUsed"] == 3.5


def test_a_turn_that_is_charged_already_is_not_charged_again(bench, monkeypatch):
    complete = lifecycle.complete

    def late(run: Run, turn: Turn, *, charge: lifecycle.Charge, **kwargs: Any) -> Any:
        ledger.settle(charge.hold, charge.amount, price=charge.price)
        return complete(run, turn, charge=charge, **kwargs)

    monkeypatch.setattr(lifecycle, "complete", late)
    run = bench.finish("/usage 1000 2000\n/say ok")
    assert (run["status"], run["totalCreditsUsed"]) == ("completed", 3.5)
    assert sorted(kind for kind, _ in rows(run)) == ["HOLD", "RELEASE", "USAGE"]


def test_who_lost_the_lease_completes_and_charges_nothing(bench, monkeypatch):
    complete, refused = lifecycle.complete, []

    def twice(run: Run, *args: Any, **kwargs: Any) -> Any:
        before = Account.objects.values_list("balance", "held").get()
        with pytest.raises(lifecycle.LeaseLost):
            complete(changed(run, lease_token=run.lease_token - 1), *args, **kwargs)
        refused.append(Account.objects.values_list("balance", "held").get() == before)
        assert Run.objects.get().chat.active_run_id == run.pk
        return complete(run, *args, **kwargs)

    monkeypatch.setattr(lifecycle, "complete", twice)
    run = bench.finish("/usage 1000 2000\n/say ok")
    assert (run["status"], run["totalCreditsUsed"], refused) == ("completed", 3.5, [True])


def test_a_free_model_writes_no_rows(bench):
    AgentModel.objects.update(price_in=0, price_out=0)
    catalogue.refresh()
    run = bench.finish("/usage 1000 2000\n/say ok")
    assert rows(run) == []
    assert run["usage"]["inputTokens"] == 1000


@pytest.mark.parametrize("runs", [20])
def test_parallel_runs_never_spend_more_than_there_is(bench, user, settings, runs):
    """Each uses all that it may, and more."""
    settings.RUN_USER_LIMIT = 0
    set_available(user, 100)
    started = [bench.start("/wait 0.3\n/usage 1000000 1000000\n/say x") for _ in range(runs)]
    ended = [bench.wait(run["id"]) for run in started]
    assert {run["errorCode"] for run in ended} <= {None, "INSUFFICIENT_CREDITS"}
    account = Account.objects.get(pk=user.pk)
    assert (account.held, account.balance >= 0, account.balance <= 10 * MICRO) == (0, True, True)


def test_a_budget_is_never_exceeded(bench):
    run = bench.finish("/usage 1000000 1000000\n/say x", maxCredits=1)
    assert run["status"] == "completed"
    assert 0.9 <= run["totalCreditsUsed"] <= 1
    run = bench.finish("/usage 1000000 1000000\n/say x", maxCredits=0.3)
    assert (run["errorCode"], run["totalCreditsUsed"]) == ("BUDGET_EXCEEDED", 0)


def claimed(user: Any, **columns: Any) -> Run:
    run = services.start_run(user, ChatFactory(user=user).pk, message="m")
    Run.objects.filter(pk=run.pk).update(**columns)
    found = lifecycle.claim(run.pk, "wrk_a")
    assert found is not None
    return found


def test_a_call_has_what_other_steps_leave_of_the_budget(user):
    run = claimed(user, max_credits=5 * MICRO)
    lifecycle.hold_turn(run, 1, 1, 2 * MICRO, {})
    for estimate, status in ((4, "FAILED"), (3, "DISPATCHING"), (1, "FAILED")):
        call = ToolInvocationFactory(run=run, status="PENDING", credit_estimate=estimate * MICRO)
        run, (call,), *_ = lifecycle.dispatch_calls(run, [call])
        assert (call.status, call.error_code) == (status, "BUDGET_EXCEEDED" if status == "FAILED" else None)
    lifecycle.finish(run)


def test_an_approved_call_that_cannot_be_made_keeps_no_hold(user, settings):
    settings.PARKED_CALLS_PER_USER = 0
    run = claimed(user)
    call = ToolInvocationFactory(run=run, status="PENDING", credit_estimate=MICRO, park_seconds=60)
    about = {"run_id": run.pk, "chat_id": run.chat_id, "invocation_id": call.pk, "tool_key": call.name}
    ledger.hold(user.pk, MICRO, price={}, **about)
    run, (call,), *_ = lifecycle.dispatch_calls(run, [call], {call.pk})
    assert (call.status, ledger.account_for(user.pk).held) == ("FAILED", 0)
    lifecycle.finish(run)


def test_with_few_credits_left_the_answer_is_shorter(bench, user):
    set_available(user, 0.5)
    run = bench.finish("/stream 3000 0")
    assert (run["status"], run["finishReason"]) == ("completed", "length")
    assert 0.45 <= run["totalCreditsUsed"] <= 0.5
    assert len(bench.content(run)) > 1000


@pytest.mark.parametrize("script", ["/stream 400 5", "/stream 200 5\n/cut", "/stream 200 5\n/wait 5"])
def test_a_turn_that_ends_early_is_charged_and_marked(bench, settings, script):
    settings.MODEL_ATTEMPTS = 1
    run = bench.start(script)
    if script.endswith("/cut"):
        run = bench.wait(run["id"])
        assert run["errorCode"] == "MODEL_ERROR"
    else:
        until(lambda: bench.get(run["id"])["lastStreamIndex"] > 8)
        bench.cancel(run["id"])
        run = bench.wait(run["id"])
        assert run["status"] == "cancelled"
    row = usage(run)
    sent = len(bench.content(run)) / 4 * 1500
    assert row.price["partial"] is True
    assert sent * 0.9 <= row.amount <= sent * 1.1 + 10_000
    assert Account.objects.get().held == 0


def test_a_refused_request_costs_nothing(bench, settings):
    settings.MODEL_ATTEMPTS = 1
    run = bench.finish("/flaky 503 5 never")
    assert (run["status"], run["totalCreditsUsed"]) == ("failed", 0)
    assert [kind for kind, _ in rows(run)] == ["HOLD", "RELEASE"]


def test_each_attempt_has_a_hold_and_what_it_used_is_charged(bench, settings, monkeypatch):
    settings.MODEL_ATTEMPTS = 3
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    run = bench.finish("/say " + "word " * 100 + "\n/cut")
    assert (run["status"], run["usage"]["modelRetries"]) == ("failed", 2)
    charged = LedgerEntry.objects.filter(run_id=run["id"], type="USAGE")
    assert [row.price["partial"] for row in charged] == [True] * 3
    assert run["totalCreditsUsed"] * MICRO == sum(row.amount for row in charged) > 3 * 120 * 1500
    assert run["usage"]["turns"] == 3
    assert run["usage"]["outputTokens"] == sum(row.price["outputTokens"] for row in charged)


@pytest.mark.slow
def test_a_lost_worker_that_streamed_text_is_charged(bench, engines):
    run = bench.start("/stream 200 10\n/say end")
    until(lambda: bench.get(run["id"])["lastStreamIndex"] > 8)
    vanish(bench.engine)
    streamed = len(lifecycle.streamed_text(Run.objects.get()))
    engines()
    run = bench.wait(run["id"])
    assert run["status"] == "completed"
    (partial,) = LedgerEntry.objects.filter(run_id=run["id"], type="USAGE", price__partial=True)
    assert partial.amount >= streamed / 4 * 1500
    assert run["usage"]["turns"] == 2
