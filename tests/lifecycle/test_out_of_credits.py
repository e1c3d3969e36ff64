"""With ``onCreditsExhausted: wait``, a run pauses where credits or budget do not reach, and loses nothing."""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from config.kernel import clock
from config.kernel.money import MICRO
from credits import ledger
from credits.models import Account, LedgerEntry
from runs import catalogue, lifecycle
from runs.catalogue import agents
from runs.models import Run, Tool, ToolInvocation, Waitpoint
from tests.driver import until
from tests.factories import EndpointFactory, UserFactory
from tests.lifecycle.conftest import Bench, vanish
from webhooks.models import Delivery

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("laws")]

# A turn of such a run needs about 0.39 credits, and a chart 12.
SAY = "/say ok"
CHART = '/call draw_chart {"title": "t", "series": [1]}\n/say {result}'


@pytest.fixture
def staff(db: None) -> Any:
    return UserFactory(is_staff=True)


def set_available(user: Any, credits: float, staff: Any) -> None:
    if change := round(credits * MICRO) - ledger.account_for(user.pk).available:
        ledger.adjust(user.pk, change, reason="for the test", staff=staff)


def grant(user: Any, credits: float) -> None:
    number = LedgerEntry.objects.filter(type="GRANT").count()
    ledger.grant(user.pk, round(credits * MICRO), cause=f"test:{user.pk}:{number}")


def paused(bench: Bench, message: str = SAY, **body: Any) -> dict[str, Any]:
    return bench.ask(message, **{"onCreditsExhausted": "wait"} | body)


def waitpoint_of(run: dict[str, Any]) -> Waitpoint:
    return Waitpoint.objects.filter(run=run["id"]).latest("created_at")


def test_a_turn_waits_and_a_grant_wakes_the_run(bench, user, staff, events, settings):
    settings.TOP_UP_URL = "https://app.example.com/buy?user={userId}"
    set_available(user, 0.1, staff)
    run = paused(bench)
    asked = run["pendingWaitpoint"]["requestPayload"]
    assert 0.1 < asked.pop("estimatedCredits") < 1
    assert asked == {
        "toolName": "model",
        "threshold": 0.1,
        "toolInvocationId": None,
        "input": {},
        "reason": "INSUFFICIENT_CREDITS",
        "topUpUrl": f"https://app.example.com/buy?user={user.username}",
    }
    assert (run["pendingWaitpoint"]["kind"], run["totalCreditsUsed"]) == ("CREDIT_APPROVAL", 0)
    assert Account.objects.get(pk=user.pk).held == 0
    grant(user, 5)
    run = bench.wait(run["id"])
    assert (run["status"], run["answer"], run["usage"]["turns"]) == ("completed", "ok", 1)
    resolved = waitpoint_of(run).resolved_payload
    assert (resolved["approved"], resolved["by"]) == (True, "grant")
    statuses = [data["status"] for kind, data in events(run["id"]) if kind == "run.status"]
    assert statuses == ["queued", "running", "waiting", "queued", "running", "completed"]


@pytest.mark.parametrize("by", ["refund", "adjustment"])
def test_what_staff_do_wakes_a_run(bench, user, staff, by):
    spent = bench.finish(SAY)
    set_available(user, 0.1, staff)
    run = paused(bench)
    if by == "refund":
        usage = LedgerEntry.objects.get(run_id=spent["id"], type="USAGE")
        needed = waitpoint_of(run).needed - ledger.account_for(user.pk).available
        ledger.adjust(user.pk, needed - usage.amount, reason="almost", staff=staff)
        assert bench.get(run["id"])["status"] == "waiting"
        ledger.refund(usage.pk, usage.amount, reason="sorry", staff=staff)
    else:
        ledger.adjust(user.pk, 5 * MICRO, reason="more", staff=staff)
    run = bench.wait(run["id"])
    assert (run["status"], waitpoint_of(run).resolved_payload["by"]) == ("completed", by)


def test_a_released_hold_wakes_a_run(bench, user, staff):
    set_available(user, 6, staff)
    held = ledger.hold(
        user.pk, ledger.account_for(user.pk).available, chat_id="chat_x", run_id="run_x", price={}, cause="other"
    )
    run = paused(bench)
    grant(user, 0.01)  # too little
    assert bench.get(run["id"])["status"] == "waiting"
    ledger.settle(held, 0)
    run = bench.wait(run["id"])
    assert (run["status"], waitpoint_of(run).resolved_payload["by"]) == ("completed", "release")


def test_a_budget_waits_for_a_higher_one(bench, user):
    run = paused(bench, maxCredits=0.3)
    asked = run["pendingWaitpoint"]["requestPayload"]
    assert (asked["reason"], asked["threshold"]) == ("BUDGET_EXCEEDED", 0.3)
    grant(user, 100)
    path = f"/waitpoints/{run['pendingWaitpoint']['id']}/respond"
    for wrong in ({"maxCredits": 0.3}, {"maxCredits": 0.2}, {"maxCredits": 0}, {"approved": False, "maxCredits": 2}):
        refused = bench.http.post(path, {"kind": "CREDIT_APPROVAL", "approved": True} | wrong)
        assert (refused.status_code, list(refused.json()["error"]["details"]["fields"])) == (400, ["maxCredits"])
    assert bench.get(run["id"])["status"] == "waiting"
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True, maxCredits=2)
    run = bench.wait(run["id"])
    assert (run["status"], waitpoint_of(run).resolved_payload["maxCredits"]) == ("completed", 2)
    assert Run.objects.get(pk=run["id"]).max_credits == 2 * MICRO


def test_only_a_run_that_waits_for_credits_has_its_budget_raised(bench):
    run = bench.ask(CHART, creditApprovalThreshold=1, maxCredits=20)
    path = f"/waitpoints/{run['pendingWaitpoint']['id']}/respond"
    refused = bench.http.post(path, {"kind": "CREDIT_APPROVAL", "approved": True, "maxCredits": 30})
    assert (refused.status_code, list(refused.json()["error"]["details"]["fields"])) == (400, ["maxCredits"])


def test_approved_without_enough_it_waits_again(bench, user, staff):
    set_available(user, 0.1, staff)
    run = paused(bench)
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    until(lambda: Waitpoint.objects.filter(run=run["id"]).count() == 2)
    again = bench.wait(run["id"], "waiting")
    assert again["pendingWaitpoint"]["id"] != run["pendingWaitpoint"]["id"]
    grant(user, 5)
    assert bench.wait(run["id"])["status"] == "completed"


def test_a_refused_run_fails_with_the_code_and_the_numbers(bench, user, staff, events):
    set_available(user, 0.1, staff)
    run = paused(bench)
    needs = run["pendingWaitpoint"]["requestPayload"]["estimatedCredits"]
    bench.respond(run, kind="CREDIT_APPROVAL", approved=False, reason="too dear")
    run = bench.wait(run["id"])
    message = f"The next step can cost up to {needs} credits; 0.1 are available."
    assert (run["status"], run["errorCode"], run["errorMessage"]) == ("failed", "INSUFFICIENT_CREDITS", message)
    resolved = waitpoint_of(run).resolved_payload
    assert {name: resolved[name] for name in ("approved", "reason")} == {"approved": False, "reason": "too dear"}
    kinds = [kind for kind, _ in events(run["id"])]
    assert kinds.index("waitpoint.resolved") < len(kinds) - 1


def test_by_default_a_run_fails(bench, user, staff):
    set_available(user, 0.1, staff)
    run = bench.finish(SAY)
    assert (run["status"], run["errorCode"]) == ("failed", "INSUFFICIENT_CREDITS")
    assert run["errorMessage"].endswith("credits; 0.1 are available.")


@pytest.fixture
def chart(db: None) -> Callable[[str], None]:
    def needs(approval: str) -> None:
        Tool.objects.filter(name="draw_chart").update(approval=approval)
        catalogue.refresh()

    return needs


@pytest.mark.parametrize("approval", ["never", "always"])
def test_a_call_waits_and_is_made_and_charged_once(bench, user, staff, chart, approval):
    chart(approval)
    set_available(user, 3, staff)
    run = paused(bench, CHART)
    if approval == "always":
        bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
        until(lambda: Waitpoint.objects.filter(run=run["id"], needed__isnull=False).exists())
        run = bench.wait(run["id"], "waiting")
    call = run["toolInvocations"][0]
    asked = run["pendingWaitpoint"]["requestPayload"]
    assert (call["status"], asked["toolName"], asked["toolInvocationId"]) == ("PENDING", "draw_chart", call["id"])
    assert (asked["input"], asked["estimatedCredits"]) == (call["input"], call["creditEstimate"])
    grant(user, 20)
    run = bench.wait(run["id"])
    assert (run["status"], [call["status"] for call in run["toolInvocations"]]) == ("completed", ["COMPLETED"])
    assert LedgerEntry.objects.filter(run_id=run["id"], type="CAPTURE").count() == 1


def test_the_other_calls_of_a_turn_are_made_first(bench, user, staff, chart):
    chart("never")
    set_available(user, 3, staff)
    many = '/call draw_chart {"title": "t", "series": [1]}\n/call calculate {"expression": "1+1"}\n/say done'
    run = bench.start(many, onCreditsExhausted="wait")
    run = bench.wait(run["id"], "waiting", "completed", "failed")
    states = {call.name: call.status for call in ToolInvocation.objects.filter(run=run["id"])}
    assert run["status"] == "waiting"
    assert (states["draw_chart"], states["calculate"]) == ("PENDING", "COMPLETED")
    grant(user, 20)
    assert bench.wait(run["id"])["status"] == "completed"


def test_a_call_over_the_budget_waits_for_a_higher_one(bench, chart):
    chart("never")
    run = paused(bench, CHART, maxCredits=3)
    assert run["pendingWaitpoint"]["requestPayload"]["reason"] == "BUDGET_EXCEEDED"
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True, maxCredits=20)
    run = bench.wait(run["id"])
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"]


def test_many_waiting_runs_never_take_the_account_below_zero(bench, user, staff, settings):
    settings.RUN_USER_LIMIT = 0
    set_available(user, 0.1, staff)
    started = [bench.start("/usage 500 500\n/say ok", onCreditsExhausted="wait") for _ in range(12)]
    until(lambda: Run.objects.filter(status="waiting").count() == len(started))
    left, generator = {run["id"] for run in started}, random.Random(1)
    while left:
        grant(user, generator.choice([0.5, 2, 6]))
        until(lambda: not Run.objects.filter(status__in=["queued", "running"]).exists())
        left = set(Run.objects.filter(status="waiting").values_list("pk", flat=True))
    assert {bench.get(run["id"])["status"] for run in started} == {"completed"}
    balance = 0
    for row in LedgerEntry.objects.filter(account=user.pk).order_by("created_at", "id"):
        balance += money_effect(row)
        assert balance >= 0
    assert LedgerEntry.objects.filter(type="USAGE").count() == len(started)


def money_effect(row: LedgerEntry) -> int:
    signs = {"GRANT": 1, "REFUND": 1, "ADJUSTMENT": 1, "USAGE": -1, "CAPTURE": -1, "EXPIRY": -1}
    return signs.get(row.type, 0) * row.amount


def test_the_oldest_run_goes_first_and_one_that_needs_too_much_lets_others_pass(bench, user, staff):
    set_available(user, 0.1, staff)
    large = paused(bench, "x" * 60_000)
    first, second = paused(bench), paused(bench)
    grant(user, waitpoint_of(first).needed / MICRO)
    ended = [bench.wait(run["id"])["startedAt"] and waitpoint_of(run).resolved_at for run in (first, second)]
    assert ended == sorted(ended)  # the second one takes what the first one did not spend
    assert bench.get(large["id"])["status"] == "waiting"
    bench.cancel(large["id"])
    assert bench.wait(large["id"])["status"] == "cancelled"


def test_credits_that_reach_for_one_run_resume_one_while_no_worker_executes_it(bench, user, staff):
    set_available(user, 0.1, staff)
    first, second = paused(bench), paused(bench)
    vanish(bench.engine)
    grant(user, waitpoint_of(first).needed / MICRO)
    lifecycle.resume_paid(user.pk)  # as a later sweep
    assert [bench.get(run["id"])["status"] for run in (first, second)] == ["queued", "waiting"]


def test_older_runs_that_wait_for_a_budget_starve_no_other(bench, user, staff, monkeypatch):
    monkeypatch.setattr("runs.lifecycle.waitpoints.RESUMED_AT_ONCE", 2)
    older = [paused(bench, maxCredits=0.3) for _ in range(2)]
    set_available(user, 0.1, staff)
    run = paused(bench)
    grant(user, 5)
    assert bench.wait(run["id"])["status"] == "completed"
    assert [bench.get(run["id"])["status"] for run in older] == ["waiting"] * 2


def test_it_expires(bench, user, staff):
    set_available(user, 0.1, staff)
    run = paused(bench)
    assert waitpoint_of(run).expires_at - clock.now() > timedelta(days=6)
    Waitpoint.objects.filter(run=run["id"]).update(expires_at=clock.now())
    assert bench.wait(run["id"])["errorCode"] == "WAITPOINT_EXPIRED"


@pytest.mark.parametrize("in_time", [True, False])
def test_a_wait_that_ends_without_a_worker_ends_as_its_time_said(bench, engines, user, staff, monkeypatch, in_time):
    set_available(user, 0.1, staff)
    run = paused(bench)
    vanish(bench.engine)
    if in_time:
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "resume_paid", lambda user_id: 0)  # the nudge is lost
            grant(user, 5)
    Waitpoint.objects.filter(run=run["id"]).update(expires_at=clock.now())
    if not in_time:
        grant(user, 5)
        assert bench.get(run["id"])["status"] == "waiting"
    engines()
    assert bench.wait(run["id"])["errorCode"] == (None if in_time else "WAITPOINT_EXPIRED")


def test_the_agent_says_what_a_run_does_and_a_request_may_say_otherwise(bench, user, staff):
    agents.save("patient", display_name="Patient", on_credits_exhausted="wait")
    set_available(user, 0.1, staff)
    assert bench.finish(SAY, agent="patient", onCreditsExhausted="fail")["errorCode"] == "INSUFFICIENT_CREDITS"
    assert bench.ask(SAY, agent="patient")["pendingWaitpoint"]["requestPayload"]["toolName"] == "model"


def test_a_run_is_not_started_without_a_balance(bench, user, staff):
    set_available(user, 0, staff)
    refused = bench.http.post(f"/chats/{bench.chat()}/runs", {"message": SAY, "onCreditsExhausted": "wait"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (402, "INSUFFICIENT_CREDITS")


@pytest.mark.parametrize("choice", ["wait", "fail"])
def test_the_app_is_told(bench, user, staff, choice):
    EndpointFactory(user=None, extended_events=True)
    set_available(user, 0.1, staff)
    run = bench.start(SAY, onCreditsExhausted=choice)
    run = bench.wait(run["id"], "waiting", "failed")
    told = Delivery.objects.get(event_type="credits.exhausted")
    assert f'"available":0.1,"runId":"{run["id"]}"' in bytes(told.body, "utf-8").decode()


@pytest.mark.parametrize(
    ("credits", "budget", "limited_by"), [(0.5, None, "credits"), (100, 0.5, "budget"), (100, None, None)]
)
def test_who_cut_the_answer_is_told(bench, user, staff, credits, budget, limited_by):
    set_available(user, credits, staff)
    run = bench.finish("/stream 3000 0", **({"maxCredits": budget} if budget else {}))
    reason = "length" if limited_by else "stop"
    assert (run["status"], run["finishReason"], run["limitedBy"]) == ("completed", reason, limited_by)


@pytest.mark.parametrize("choice", ["fail", "wait"])
def test_a_call_that_the_budget_cuts_is_no_failure_of_the_model(bench, choice):
    """The call has about 770 tokens, which cost 1.16 credits."""
    script = '/call create_file {"fileName": "a.txt", "content": "' + "x" * 3000 + '"}\n/say done'
    run = bench.start(script, maxCredits=0.8, onCreditsExhausted=choice)
    if choice == "fail":
        run = bench.wait(run["id"])
        assert (run["status"], run["errorCode"]) == ("failed", "BUDGET_EXCEEDED")
        return
    run = bench.wait(run["id"], "waiting", "failed")
    asked = run["pendingWaitpoint"]["requestPayload"]
    assert (asked["toolName"], asked["reason"]) == ("model", "BUDGET_EXCEEDED")
    assert 0.7 < run["totalCreditsUsed"] <= 0.8
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True, maxCredits=50)
    run = bench.wait(run["id"])
    assert (run["status"], run["answer"], run["usage"]["turns"]) == ("completed", "done", 3)
