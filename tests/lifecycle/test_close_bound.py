"""How much of a budget can be used: what a provider has counted before stands for what a request begins with."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from credits.models import LedgerEntry
from runs import catalogue
from runs.engine import requests
from runs.errors import FailureReason
from runs.llm.base import ModelError, ModelRequest, TurnEnd, Usage
from runs.models import AgentModel, CountedBeginning, Provider, Tool
from tests.lifecycle.conftest import Bench

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("laws")]

LONG = "You are the support agent of Example. Answer briefly and politely. " * 50


class Talkative:
    """A model that counts a token for four bytes and writes as much as it may. ``counts``: it can be asked before."""

    reads_files = True
    counts = True
    asked = 0
    fails: tuple[str, ...] = ()

    def tokens(self, request: ModelRequest) -> int:
        text = repr((request.instructions, request.tools, request.messages))
        return len(text.encode()) // 4

    async def count(self, request: ModelRequest) -> int | None:
        self.asked += 1
        return self.tokens(request) if self.counts else None

    async def stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        if request.model.name in self.fails:
            raise ModelError(FailureReason.REQUEST_REFUSED)
        yield "word " * 10
        yield TurnEnd(Usage(self.tokens(request), request.max_output_tokens), "length")


@pytest.fixture
def model(monkeypatch, engines) -> Talkative:
    talkative = Talkative()
    monkeypatch.setattr("runs.engine.requests.client_for", lambda server: talkative)
    provider = Provider.objects.create(name="plain", kind="openai", base_url="http://127.0.0.1:9/v1")
    for name, out in (("plain", 1_500_000), ("cheap", 150_000)):
        AgentModel.objects.create(
            name=name,
            display_name=name,
            provider=provider,
            provider_model=name,
            price_in=500_000,
            price_out=out,
            context_tokens=200_000,
            max_output_tokens=8192,
        )
    AgentModel.objects.filter(name="plain").update(fallbacks=["cheap"])
    catalogue.refresh()
    requests._known.clear()
    yield talkative
    requests._known.clear()


def spent(bench: Bench, budget: float = 6, **body: Any) -> float:
    run = bench.finish("Hi", **{"model": "plain", "instructions": LONG, "maxCredits": budget} | body)
    assert (run["status"], run["finishReason"], run["limitedBy"]) == ("completed", "length", "budget"), run
    assert run["totalCreditsUsed"] <= budget
    return float(run["totalCreditsUsed"]) / budget


def test_from_the_second_run_on_nearly_all_of_a_budget_can_be_used(bench, model):
    assert spent(bench) < 0.7
    assert spent(bench) >= 0.9
    requests._known.clear()  # another process
    assert spent(bench) >= 0.9


def test_in_the_same_chat_the_last_run_is_counted_too(bench, model):
    first = bench.finish("Hi " * 3000, model="plain", instructions=LONG)
    run = bench.wait(bench.start("And?", first["chatId"], model="plain", instructions=LONG, maxCredits=6)["id"])
    assert 0.9 * 6 <= run["totalCreditsUsed"] <= 6


def test_a_changed_tool_or_text_is_bounded_by_its_bytes_again(bench, model):
    spent(bench)
    Tool.objects.filter(name="draw_chart").update(description="Draws anything.")
    catalogue.refresh()
    assert spent(bench) < 0.7
    assert spent(bench, instructions=LONG.upper()) < 0.7


def test_with_a_fallback_the_count_of_another_model_is_not_used(bench, model):
    spent(bench)
    model.fails = ("plain",)
    run = bench.finish("Hi", model="plain", instructions=LONG, maxCredits=1.9)
    assert run["totalCreditsUsed"] <= 1.9


def test_a_provider_that_can_count_is_asked_before_the_bytes_decide(bench, model):
    AgentModel.objects.update(dialect={"countsTokens": True})
    catalogue.refresh()
    assert spent(bench) >= 0.9
    assert model.asked == 1
    # Not if the full output limit is covered anyway.
    bench.finish("Hi", model="cheap", instructions=LONG)
    assert model.asked == 1


def test_one_that_cannot_after_all_costs_nothing_but_the_bound(bench, model):
    AgentModel.objects.update(dialect={"countsTokens": True})
    catalogue.refresh()
    model.counts = False
    assert spent(bench) < 0.7


def test_a_lower_count_replaces_a_higher_one(bench, model):
    bench.finish("Hi " * 1000, model="plain", instructions=LONG)
    high = CountedBeginning.objects.get().tokens
    bench.finish("Hi", model="plain", instructions=LONG)
    assert CountedBeginning.objects.get().tokens < high
    bench.finish("Hi " * 1000, model="plain", instructions=LONG)
    assert CountedBeginning.objects.get().tokens < high


def test_a_count_that_proves_too_low_is_not_used_again(bench, model):
    """A provider that once counted one token for everything does not make later turns cheaper than they are."""
    honest = model.tokens
    model.tokens = lambda request: 1
    bench.finish("Hi", model="plain", instructions=LONG)
    model.tokens = honest
    bench.finish("Hi", model="plain", instructions=LONG)  # charged up to its hold
    run = bench.finish("Hi", model="plain", instructions=LONG)
    charged = LedgerEntry.objects.get(run_id=run["id"], type="USAGE")
    assert charged.price["inputTokens"] > 800
    assert charged.amount == charged.price["inputTokens"] * 500 + charged.price["outputTokens"] * 1500
