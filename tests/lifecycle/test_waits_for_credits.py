"""A step that finds too few credits only because other steps of its user hold them waits until those have settled."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from config.kernel import clock
from config.kernel.money import MICRO
from credits import ledger
from credits.models import Account, LedgerEntry
from runs import catalogue, lifecycle, services
from runs.engine.engine import Engine
from runs.models import AgentModel, ModelAttempt, Run
from tests.driver import until
from tests.factories import ChatFactory, ToolInvocationFactory, UserFactory
from tests.lifecycle.conftest import Bench, vanish
from tests.tiers import slow

pytestmark = pytest.mark.django_db(transaction=True)

# The first turn of a run holds about 6.15 credits, and needs 0.4.
SLOW = "/wait 1\n/say slow"
CHART = '/call draw_chart {"title": "t", "series": [1]}\n/say {result}'


@pytest.fixture
def available(user: Any) -> Callable[[float], None]:
    def set_to(credits: float) -> None:
        change = round(credits * MICRO) - ledger.account_for(user.pk).available
        ledger.adjust(user.pk, change, reason="for the test", staff=UserFactory(is_staff=True))

    return set_to


@pytest.fixture(autouse=True)
def nothing_is_held(laws: None) -> Any:
    yield
    assert Account.objects.get(pk=Run.objects.values("user")[:1]).held == 0


def holding(bench: Bench, message: str = SLOW) -> dict[str, Any]:
    run = bench.start(message)
    until(lambda: LedgerEntry.objects.filter(run_id=run["id"], type="HOLD").exists())
    return run


def waiting(bench: Bench, message: str = "/say ok") -> dict[str, Any]:
    run = bench.start(message)
    until(lambda: Run.objects.get(pk=run["id"]).credits_wanted_at)
    return run


def test_runs_side_by_side_complete_if_the_credits_suffice_for_all(bench, available):
    available(12)
    started = [bench.start("/wait 0.1\n/say ok") for _ in range(12)]
    ended = [bench.wait(run["id"]) for run in started]
    assert [run["status"] for run in ended] == ["completed"] * 12


def test_a_run_starts_and_waits_while_all_credits_are_held(bench, available):
    available(6.1)
    first = holding(bench)
    second = waiting(bench)
    assert LedgerEntry.objects.filter(run_id=second["id"]).count() == 0
    assert [bench.wait(run["id"])["status"] for run in (first, second)] == ["completed"] * 2
    assert Run.objects.filter(credits_wanted_at__isnull=False).count() == 0


def test_a_call_that_was_approved_waits_for_its_hold(bench, available):
    available(13)
    run = bench.ask(CHART)
    other = holding(bench, "/wait 60\n/say slow")
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    until(lambda: Run.objects.get(pk=run["id"]).credits_wanted_at)
    bench.cancel(other["id"])
    run = bench.wait(run["id"])
    (call,) = run["toolInvocations"]
    assert (run["status"], call["status"], call["creditUsed"]) == ("completed", "COMPLETED", 12)


def test_a_cancel_ends_the_wait(bench, available):
    available(6.1)
    first = holding(bench, "/wait 30\n/say slow")
    second = waiting(bench)
    bench.cancel(second["id"])
    assert bench.wait(second["id"])["status"] == "cancelled"
    assert bench.get(first["id"])["status"] == "running"
    bench.cancel(first["id"])
    bench.wait(first["id"])


def test_the_time_of_a_run_counts_while_it_waits(bench, available, settings):
    available(6.1)
    first = holding(bench, "/wait 30\n/say slow")
    settings.RUN_TIMEOUT_SECONDS = 1
    assert bench.wait(waiting(bench)["id"])["errorCode"] == "RUN_TIMEOUT"
    bench.cancel(first["id"])
    bench.wait(first["id"])


def test_a_hold_that_a_person_must_free_is_not_waited_for(bench, available):
    """A question with a price has its hold since its approval, while its run waits for the answer."""
    available(13)
    run = bench.ask("/ask Which?")
    ledger.hold(
        Run.objects.get().user_id,
        ledger.account_for(Run.objects.get().user_id).available - 1000,
        invocation_id=run["pendingWaitpoint"]["requestPayload"].get("toolInvocationId", "inv_x"),
        tool_key="ask_user",
        run_id=run["id"],
        chat_id=run["chatId"],
        price={},
    )
    assert bench.finish("/say ok")["errorCode"] == "INSUFFICIENT_CREDITS"
    bench.cancel(run["id"])


def test_what_is_held_is_not_waited_for_if_it_is_too_little(bench, available):
    available(11)
    first = holding(bench)
    run = bench.ask(CHART)
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    (call,) = bench.wait(run["id"])["toolInvocations"]
    assert (call["status"], call["errorCode"]) == ("FAILED", "INSUFFICIENT_CREDITS")
    assert bench.wait(first["id"])["status"] == "completed"


def test_the_oldest_run_goes_first_also_before_steps_of_other_processes(bench, available):
    available(6.1)
    first = holding(bench)
    older = waiting(bench)
    younger = Run.objects.get(pk=older["id"])
    younger.created_at += timedelta(seconds=1)
    assert lifecycle.spendable(younger, 0) is None  # nothing is needed, but the older run comes first
    Run.objects.filter(pk=first["id"]).update(credits_wanted_at=clock.now() - timedelta(minutes=1))
    assert lifecycle.spendable(Run.objects.get(pk=older["id"]), 0) is not None  # a lost worker holds nobody up
    assert [bench.wait(run["id"])["status"] for run in (first, older)] == ["completed"] * 2


def test_no_step_is_held_for_before_that_of_an_older_run_that_waits(user):
    chats = [ChatFactory(user=user).pk for _ in range(2)]
    older, younger = [lifecycle.claim(services.start_run(user, chat, message="m").pk, "wrk_a") for chat in chats]
    call = ToolInvocationFactory(run=younger, status="PENDING", credit_estimate=MICRO)
    Run.objects.filter(pk=older.pk).update(credits_wanted_at=clock.now())
    with pytest.raises(ledger.InsufficientCredits):
        lifecycle.hold_turn(younger, 1, 1, MICRO, {})
    younger, (call,), *_ = lifecycle.dispatch_calls(younger, [call])
    assert (call.status, LedgerEntry.objects.filter(type="HOLD").count()) == ("PENDING", 0)
    assert lifecycle.hold_turn(older, 1, 1, MICRO, {})
    Run.objects.filter(pk=older.pk).update(credits_wanted_at=clock.now() - timedelta(minutes=1))  # its worker is lost
    assert lifecycle.hold_turn(younger, 1, 1, MICRO, {})
    younger, (call,), *_ = lifecycle.dispatch_calls(younger, [call])
    assert (call.status, LedgerEntry.objects.filter(type="HOLD").count()) == ("DISPATCHING", 3)
    for run in (older, younger):
        lifecycle.finish(run)


def test_who_waits_holds_no_place_at_the_provider(bench, available):
    available(6.1)
    runs = [holding(bench), waiting(bench)]
    assert sum(provider.working for provider in bench.engine.process.model_places.providers.values()) == 1
    assert {bench.wait(run["id"])["status"] for run in runs} == {"completed"}


@pytest.mark.parametrize("end", ["vanish", *slow("shut down")])
def test_the_wait_of_a_lost_worker_continues_elsewhere(bench, engines: Callable[[], Engine], available, end):
    available(6.1)
    first = holding(bench, "/wait 30\n/say slow")
    second = waiting(bench)
    vanish(bench.engine) if end == "vanish" else bench.engine.stop(0)
    engines()
    until(lambda: Run.objects.get(pk=second["id"]).lease_token > 1)
    bench.cancel(first["id"])
    assert bench.wait(second["id"])["status"] == "completed"
    bench.wait(first["id"])


def add_dear_model() -> None:
    """The model `dear`, with the fallback `demo`."""
    demo = AgentModel.objects.get(name="demo")
    demo.pk, demo.name, demo.is_default, demo.fallbacks = None, "dear", False, ["demo"]
    demo.price_in = demo.price_out = 500 * MICRO
    demo.save()
    catalogue.refresh()


def test_a_cheaper_fallback_is_asked_if_credits_do_not_reach_for_the_model(bench, available):
    add_dear_model()
    available(5)
    run = bench.finish("Hello", model="dear")
    assert (run["status"], run["resolvedModel"]) == ("completed", "demo")
    run = bench.finish("Hello", model="dear", maxCredits=0.1)
    assert run["errorCode"] == "BUDGET_EXCEEDED"


def test_a_model_that_was_too_dear_is_asked_if_credits_came_while_its_fallback_failed(
    bench, available, settings, monkeypatch
):
    settings.MODEL_ATTEMPTS = 2
    monkeypatch.setattr("runs.llm.refusals.random.uniform", lambda *args: 2.0)
    add_dear_model()
    available(5)
    run = bench.start("/flaky 503 2 Hello", model="dear")
    until(ModelAttempt.objects.exists)
    available(5000)
    run = bench.wait(run["id"])
    assert (run["status"], run["resolvedModel"]) == ("completed", "dear")
    assert list(ModelAttempt.objects.values_list("model", flat=True)) == ["demo", "demo"]
