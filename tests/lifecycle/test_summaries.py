"""Models that summarise badly, and providers that count wrongly: the chat continues, and every request is settled."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from config.kernel import clock
from credits.models import LedgerEntry
from runs import catalogue
from runs.admin import timeline
from runs.catalogue import agents
from runs.errors import FailureReason
from runs.llm.base import ModelError, ModelEvent, ModelRequest, ToolCall, TurnEnd, Usage
from runs.models import AgentModel, Compaction, ModelAttempt, Run
from tests.driver import until
from tests.lifecycle.conftest import Bench, vanish
from tests.lifecycle.contexts import Provider, fill, in_chat, provider, rich, window  # noqa: F401
from tests.tiers import slow

# ruff: noqa: F811 (fixtures)
pytestmark = pytest.mark.django_db(transaction=True)


def long_chat(bench: Bench, window: Callable[..., None]) -> str:
    """A chat that the window cannot hold."""
    window(100_000, 500)
    chat = bench.chat()
    fill(bench, chat)
    window(3000, 500)
    return chat


async def nothing(request: ModelRequest) -> AsyncIterator[ModelEvent]:
    yield TurnEnd(Usage(100, 1))


async def calls(request: ModelRequest) -> AsyncIterator[ModelEvent]:
    yield ToolCall("call_1", "calculate", "{}")
    yield TurnEnd(Usage(100, 1), "tool_calls")


async def refuses_length(request: ModelRequest) -> AsyncIterator[ModelEvent]:
    raise ModelError(FailureReason.CONTEXT_TOO_LONG, status=400)
    yield


async def repeats(character: str, request: ModelRequest) -> AsyncIterator[ModelEvent]:
    """Ignores the output limit."""
    for _ in range(200):
        yield character * 1000
    yield TurnEnd(Usage(100, 50_000), "length")


async def streams_for_ever(request: ModelRequest) -> AsyncIterator[ModelEvent]:
    while True:
        yield "word "
        await asyncio.sleep(0.01)


BAD = {"nothing": nothing, "calls": calls, "refuses_length": refuses_length}
BAD |= {"repeats": partial(repeats, "x"), "repeats_wide": partial(repeats, "字")}


@pytest.mark.parametrize("name", ["nothing", *slow(*(name for name in BAD if name != "nothing"))])
def test_a_chat_continues_after_a_bad_summary(bench: Bench, provider: Provider, window, monkeypatch, name: str):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    chat = long_chat(bench, window)
    provider.summary = BAD[name]  # type: ignore[assignment]
    for _ in range(3):
        assert in_chat(bench, chat, "word " * 400)["status"] == "completed"
    assert provider.refused == 0
    kinds = {"summary"} if name.startswith("repeats") else {"left_out"}
    assert set(Compaction.objects.values_list("kind", flat=True)) == kinds
    assert len(provider.requests) < 80


async def empty(request: ModelRequest) -> AsyncIterator[ModelEvent]:
    """All of the limit went into reasoning."""
    usage = Usage(100, request.max_output_tokens)
    request.progress.usage = lambda: usage
    yield TurnEnd(usage, "length")


def add_model(name: str, **fields: Any) -> None:
    """A model beside ``demo``, which has it as its fallback."""
    demo = AgentModel.objects.get(name="demo")
    demo.fallbacks = [*demo.fallbacks, name]
    demo.save()
    demo.pk, demo.name, demo.is_default, demo.fallbacks = None, name, False, []
    for field, value in fields.items():
        setattr(demo, field, value)
    demo.save()
    catalogue.refresh()


def used_for(run: dict[str, Any]) -> list[tuple[str, int]]:
    """The models that were charged for and the amounts, without the run's turn, in the order of time."""
    summaries = LedgerEntry.objects.filter(run_id=run["id"], type="USAGE", against__price__turn__startswith="c")
    rows = summaries.order_by("pk")
    return [(row.price["model"], row.amount) for row in rows if row.price]


def test_nobody_pays_for_a_summary_without_the_turn_after_it(bench: Bench, provider: Provider, window):
    """The budget reaches for the summary alone: the runs are left out, for this run only."""
    chat = long_chat(bench, window)
    run = in_chat(bench, chat, "Hello", maxCredits=1.6)
    assert (run["status"], used_for(run)) == ("completed", [])
    assert set(Compaction.objects.values_list("kind", "only_run")) == {("left_out", True)}
    assert in_chat(bench, chat, "Hello", maxCredits=20)["status"] == "completed"
    assert len(provider.summaries) > 0


def test_a_run_waits_for_the_budget_of_a_summary(bench: Bench, provider: Provider, window):
    chat = long_chat(bench, window)
    run = bench.start("/say now", chat, maxCredits=0.9, onCreditsExhausted="wait")
    run = bench.wait(run["id"], "waiting")
    assert run["pendingWaitpoint"]["requestPayload"]["reason"] == "BUDGET_EXCEEDED"
    assert not Compaction.objects.filter(run=run["id"]).exists()
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True, maxCredits=50)
    run = bench.wait(run["id"])
    assert run["status"] == "completed"
    assert {row.kind for row in Compaction.objects.filter(run=run["id"])} == {"summary"}


def test_an_empty_summary_is_paid_once(bench: Bench, provider: Provider, window, monkeypatch):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    chat = long_chat(bench, window)
    provider.summary = empty
    run = in_chat(bench, chat, "Hello")
    assert run["status"] == "completed"
    assert [name for name, _ in used_for(run)] == ["demo"]
    assert in_chat(bench, chat, "Hello")["status"] == "completed"
    assert len(provider.summaries) == 1
    row = Compaction.objects.get()
    assert (row.kind, row.failure_reason, row.only_run) == ("left_out", "no_text", False)


def test_the_next_model_summarises_after_an_empty_summary(bench: Bench, provider: Provider, window):
    """Each request is held and charged at the prices of its own model."""
    chat = long_chat(bench, window)
    add_model("second", price_in=7_000, price_out=9_000)

    async def answer(request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if request.model.name == "demo":
            async for event in empty(request):
                yield event
            return
        yield "remember number 0"
        yield TurnEnd(Usage(100, 10))

    provider.summary = answer
    run = in_chat(bench, chat, "Hello")
    assert (run["status"], run["resolvedModel"]) == ("completed", "demo")
    names = [request.model.name for request in provider.summaries]
    assert names == ["demo"] + ["second"] * (len(names) - 1)
    demo, *others = used_for(run)
    assert demo == ("demo", 100 * 500 + provider.summaries[0].max_output_tokens * 1500)
    assert set(others) == {("second", 100 * 7 + 10 * 9)}
    assert {row.model for row in Compaction.objects.filter(kind="summary")} == {"second"}
    assert "remember number 0" in provider.sent()


def test_after_an_outage_of_all_models_a_later_run_summarises(
    bench: Bench, provider: Provider, window, settings, monkeypatch
):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    settings.MODEL_ATTEMPTS = 2
    chat = long_chat(bench, window)
    add_model("second")

    async def down(request: ModelRequest) -> AsyncIterator[ModelEvent]:
        raise ModelError(FailureReason.PROVIDER_UNAVAILABLE, status=503, detail="Overloaded.")
        yield

    provider.summary = down
    run = in_chat(bench, chat, "\n".join(["/stream 300 0\n/call calculate {}"] * 8))
    assert run["status"] == "completed"
    assert [request.model.name for request in provider.summaries] == ["demo", "demo", "second", "second"]
    assert "remember number 0" not in provider.sent()
    rows = Compaction.objects.filter(run_id=run["id"])
    assert rows[0].failure_reason == "provider_unavailable"
    assert all(row.only_run for row in rows)
    assert len(rows) > 1
    attempts = ModelAttempt.objects.filter(run_id=run["id"], compaction=1)
    assert [(row.number, row.model, row.next_model) for row in attempts] == [
        (1, "demo", "demo"), (2, "demo", "second"), (3, "second", "second"), (4, "second", "")
    ]  # fmt: skip
    assert run["usage"]["modelRetries"] == ModelAttempt.objects.filter(compaction=0).count()
    steps = timeline.build(Run.objects.get(pk=run["id"]))["steps"]
    titles = [step.title for step in steps if step.kind == "attempt" and "Compaction" in step.title]
    assert titles == [f"Compaction 1, attempt {number} failed" for number in (1, 2, 3, 4)]
    provider.summary = None
    assert in_chat(bench, chat, "Hello")["status"] == "completed"
    assert "remember number 0" in provider.sent()


@pytest.mark.slow
def test_another_worker_goes_on_with_the_attempts(
    bench: Bench, provider: Provider, window, settings, engines, monkeypatch
):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    settings.MODEL_ATTEMPTS = 3
    chat = long_chat(bench, window)

    async def limited(request: ModelRequest) -> AsyncIterator[ModelEvent]:
        wait = 0.0 if len(provider.summaries) != 2 else 60.0
        raise ModelError(FailureReason.PROVIDER_RATE_LIMITED, status=429, retry_after=wait)
        yield

    provider.summary = limited
    run = bench.start("Hello", chat)
    until(lambda: ModelAttempt.objects.count() == 2)
    vanish(bench.engine)
    ModelAttempt.objects.filter(number=2).update(next_at=clock.now())
    engines()
    assert bench.wait(run["id"])["status"] == "completed"
    assert list(ModelAttempt.objects.values_list("number", flat=True)) == [1, 2, 3]


def test_a_summary_is_not_asked_for_with_the_parameters_of_an_agent(bench: Bench, provider: Provider, window):
    agents.save("lister", display_name="L", parameters={"stop": ["\n"], "temperature": 1.5})
    own = {"stop": ["x"], "reasoningEffort": "high", "temperature": 0.5}
    own["extra"] = {"response_format": {"type": "json_object"}, "top_k": 5}
    AgentModel.objects.update(parameters=own)
    chat = long_chat(bench, window)
    assert in_chat(bench, chat, "Hello", agent="lister")["status"] == "completed"
    wanted = {"reasoningEffort": "low", "temperature": 0.5, "extra": {"top_k": 5}}
    assert all(request.model.parameters == wanted for request in provider.summaries)
    assert provider.turns[-1].model.parameters["stop"] == ["\n"]


def test_a_run_is_cancelled_during_a_summary(bench: Bench, provider: Provider, window):
    chat = long_chat(bench, window)
    provider.summary = streams_for_ever
    run = bench.start("Hello", chat)
    until(lambda: provider.summaries)
    bench.cancel(run["id"])
    assert bench.wait(run["id"])["status"] == "cancelled"
    provider.summary = None
    assert in_chat(bench, chat, "Hello")["status"] == "completed"


@pytest.mark.slow
def test_a_summary_cannot_take_longer_than_the_run(bench: Bench, provider: Provider, window, settings):
    chat = long_chat(bench, window)
    provider.summary = streams_for_ever
    settings.RUN_TIMEOUT_SECONDS = 1
    assert in_chat(bench, chat, "Hello")["errorCode"] == "RUN_TIMEOUT"


@pytest.mark.parametrize("refusal", ["short", *slow("long")])
def test_a_rate_limit_delays_a_summary_within_the_time_of_the_run(
    bench: Bench, provider: Provider, window, settings, refusal: str
):
    """After a 429 a request is tried again, whatever the reason."""
    settings.RUN_TIMEOUT_SECONDS = 30
    chat = long_chat(bench, window)
    failed = []

    async def limited(request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if not failed:
            failed.append(request)
            wait = 0.0 if refusal == "short" else 50.0
            raise ModelError(FailureReason.PROVIDER_QUOTA_EXCEEDED, status=429, retry_after=wait)
        yield "remember it all"
        yield TurnEnd(Usage(100, 10))

    provider.summary = limited
    assert in_chat(bench, chat, "Hello")["status"] == "completed"
    first = Compaction.objects.first()
    assert first is not None
    assert first.kind == ("summary" if refusal == "short" else "left_out")


@pytest.mark.parametrize("change", [{"price_in": 7_000}, {"enabled": False}])
def test_a_summary_that_waits_for_a_retry_is_asked_for_as_staff_have_changed_its_model(
    bench: Bench, provider: Provider, window, settings, change: dict[str, Any]
):
    chat = long_chat(bench, window)
    add_model("second")
    settings.RUN_SUMMARY_MODEL = "second"

    async def answer(request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if len(provider.summaries) == 1:
            raise ModelError(FailureReason.PROVIDER_UNAVAILABLE, status=503, retry_after=2.0)
        yield "remember it all"
        yield TurnEnd(Usage(100, 10))

    provider.summary = answer
    run = bench.start("Hello", chat)
    until(ModelAttempt.objects.exists)
    AgentModel.objects.filter(name="second").update(**change)
    catalogue.refresh()
    assert bench.wait(run["id"])["status"] == "completed"
    asked = provider.summaries[1].model
    assert (asked.name, asked.price_in) == (("second", 7_000) if "price_in" in change else ("demo", 500_000))


@pytest.mark.parametrize("price", [0, 500])
def test_a_summary_that_broke_off_is_no_turn(bench: Bench, provider: Provider, window, settings, price: int):
    settings.MODEL_ATTEMPTS = 1
    chat = long_chat(bench, window)
    AgentModel.objects.update(price_in=price, price_out=price)
    catalogue.refresh()

    async def breaks(request: ModelRequest) -> AsyncIterator[ModelEvent]:
        request.progress.usage = lambda: Usage(100, 10)
        yield "remember"
        raise ModelError(FailureReason.CONNECTION_LOST)

    provider.summary = breaks
    run = in_chat(bench, chat, "Hello")
    assert (run["status"], run["usage"]["turns"]) == ("completed", 1)
    assert run["usage"]["outputTokens"] > 10


def test_without_its_model_the_runs_own_summarises(bench: Bench, provider: Provider, window, settings):
    settings.RUN_SUMMARY_MODEL = "gone"
    chat = long_chat(bench, window)
    assert in_chat(bench, chat, "Hello")["status"] == "completed"
    assert {request.model.name for request in provider.summaries} == {"demo"}


@pytest.mark.parametrize("factor", [0.0, *slow(0.1, 10.0)])
def test_a_provider_that_counts_wrongly(bench: Bench, provider: Provider, window, factor: float):
    window(8000)
    provider.caches = True
    provider.usage = lambda request: Usage(int(provider.tokens(request) * factor), 1)  # type: ignore[method-assign]
    chat = bench.chat()
    for number in range(15):
        run: dict[str, Any] = in_chat(bench, chat, f"number {number} " + "word " * 800)
        assert run["status"] == "completed", run
        assert f"number {number - 1} " in provider.sent() or number == 0
    if factor != 0.1:
        assert provider.refused == 0


def test_one_earlier_run(bench: Bench, provider: Provider, window, monkeypatch):
    monkeypatch.setattr("runs.engine.history.RUN_HISTORY_RUNS", 1)
    window(3000, 500)
    chat = bench.chat()
    for number in range(5):
        assert in_chat(bench, chat, f"number {number} " + "word " * 500)["status"] == "completed"
    sent = provider.sent()
    assert ["number 4 " in sent, "number 3 " in sent, "number 2 " in sent] == [True, True, False]
    assert provider.refused == 0
