"""Staff change, disable or delete models and providers while runs use them."""

from typing import Any

import pytest

from runs import catalogue
from runs.errors import FailureReason
from runs.llm.base import ModelError
from runs.llm.demo import DemoModel
from runs.models import AgentModel, ModelAttempt, Provider, Run, Turn
from tests.driver import until
from tests.lifecycle.conftest import Bench
from tests.llm.model_server import serving

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def provider(bench: Bench) -> Provider:
    """The provider of the model ``first``, whose fallbacks ``second`` and ``third`` are at the provider ``demo``."""
    provider = Provider.objects.create(name="main", kind="demo")
    columns = {"provider_model": "demo", "price_in": 0, "price_out": 0}
    demo = Provider.objects.get(name="demo")
    for name, where, fallbacks in (("first", provider, ["second", "third"]), ("second", demo, []), ("third", demo, [])):
        AgentModel.objects.create(name=name, display_name=name, provider=where, fallbacks=fallbacks, **columns)
    catalogue.refresh()
    return provider


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests to models. Those with the seed 13 fail, and are due again after a moment."""
    seen: list[Any] = []
    stream = DemoModel.stream

    async def record(self: DemoModel, request: Any) -> Any:
        seen.append(request)
        if request.model.parameters.get("seed") == 13:
            raise ModelError(FailureReason.PROVIDER_UNAVAILABLE, status=503, retry_after=0.7)
        async for event in stream(self, request):
            yield event

    monkeypatch.setattr(DemoModel, "stream", record)
    return seen


def change(model: str, **columns: Any) -> None:
    AgentModel.objects.filter(name=model).update(**columns)
    catalogue.refresh()


def models(run: dict[str, Any]) -> list[str]:
    """The models of the run's turns."""
    return list(Turn.objects.filter(run_id=run["id"]).order_by("index").values_list("model", flat=True))


def reason(run: dict[str, Any]) -> str:
    return Run.objects.values_list("failure_reason", flat=True).get(pk=run["id"])


@pytest.mark.parametrize("disabled", ["model", "provider"])
def test_a_run_that_waits_for_an_answer_goes_on_with_the_fallbacks(bench, provider, disabled):
    run = bench.ask("/ask Which?\n/say done", model="first")
    row = provider if disabled == "provider" else AgentModel.objects.get(name="first")
    row.enabled = False
    row.save()
    change("second", enabled=False)
    bench.respond(run, kind="CLARIFICATION", answer="x")
    run = bench.wait(run["id"])
    assert (run["status"], run["resolvedModel"], models(run)) == ("completed", "third", ["first", "third"])


def test_a_run_that_waits_for_a_retry_goes_on_with_the_fallbacks(bench, provider, requests):
    change("first", parameters={"seed": 13})
    run = bench.start("/say done", model="first")
    until(ModelAttempt.objects.exists)
    change("first", enabled=False)
    run = bench.wait(run["id"])
    assert (run["status"], run["resolvedModel"], models(run)) == ("completed", "second", ["second"])
    assert [request.model.name for request in requests] == ["first", "second"]


def test_fallbacks_that_a_disabled_model_gets_are_for_the_runs_that_use_it(bench, provider):
    """How a model is retired: fallbacks, then off."""
    run = bench.ask("/ask Which?\n/say done", model="third")
    change("third", enabled=False, fallbacks=["second"])
    bench.respond(run, kind="CLARIFICATION", answer="x")
    run = bench.wait(run["id"])
    assert (run["status"], models(run)) == ("completed", ["third", "second"])


@pytest.mark.parametrize("deleted", [False, True])
def test_a_run_whose_model_is_gone_fails_and_says_why_to_staff(bench, provider, deleted):
    run = bench.ask("/ask Which?\n/say done", model="third")
    change("third", enabled=False)
    if deleted:
        AgentModel.objects.filter(name="third").delete()
    bench.respond(run, kind="CLARIFICATION", answer="x")
    run = bench.wait(run["id"])
    assert (run["status"], run["errorCode"], reason(run)) == ("failed", "MODEL_ERROR", "model_unknown")
    assert "third" not in run["errorMessage"]


def test_a_turn_that_is_under_way_ends_with_its_model(bench, provider, requests):
    run = bench.start("/wait 1\n/say done", model="third")
    until(lambda: requests)
    change("third", enabled=False)
    run = bench.wait(run["id"])
    assert (run["status"], models(run)) == ("completed", ["third"])


def test_a_run_that_named_no_model_keeps_its_model_when_the_default_changes(bench, provider, requests):
    change("demo", is_default=False)
    change("first", is_default=True)
    run = bench.ask("/ask Which?\n/say done")
    assert run["requestedModel"] is None
    change("first", is_default=False, parameters={"seed": 13}, enabled=False)
    change("demo", is_default=True)
    bench.respond(run, kind="CLARIFICATION", answer="x")
    run = bench.wait(run["id"])
    assert (run["status"], models(run)) == ("completed", ["first", "second"])
    assert bench.finish("/say done")["resolvedModel"] == "demo"


def test_a_run_stays_with_the_fallback_that_answered_when_its_model_is_deleted(bench, provider, requests, settings):
    settings.MODEL_ATTEMPTS = 1
    change("first", parameters={"seed": 13})
    run = bench.ask("/ask Which?\n/say done", model="first")
    AgentModel.objects.filter(name="first").delete()
    catalogue.refresh()
    bench.respond(run, kind="CLARIFICATION", answer="x")
    run = bench.wait(run["id"])
    assert (run["status"], models(run)) == ("completed", ["second", "second"])


def test_a_new_key_is_used_by_runs_that_wait(bench, provider, requests, monkeypatch):
    """For a retry, and for a place at the provider."""
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_POLL_SECONDS", 0.05)
    change("first", parameters={"seed": 13})
    Provider.objects.filter(pk=provider.pk).update(max_concurrent=1, api_key="sk-old-key-1")
    catalogue.refresh()
    retried = bench.start("/say done", model="first")["id"]
    until(ModelAttempt.objects.exists)
    change("first", parameters={})
    working = bench.start("/wait 2\n/say done", model="first")["id"]
    until(lambda: len(requests) == 2)
    waits = bench.start("/say done", model="first")["id"]
    places = bench.engine.process.model_places.providers
    until(lambda: places["main"].waiting == 2)
    Provider.objects.filter(pk=provider.pk).update(api_key="sk-new-key-2")
    change("first", price_in=7)
    assert {bench.wait(run_id)["status"] for run_id in (retried, working, waits)} == {"completed"}
    assert [(request.model.server.api_key, request.model.price_in) for request in requests[2:]] == [
        ("sk-new-key-2", 7)
    ] * 2


@pytest.mark.parametrize("kinds", [("openai", "anthropic"), ("anthropic", "openai_responses"), ("anthropic", "openai")])
def test_reasoning_does_not_go_back_in_another_protocol(bench, kinds):
    before, after = kinds
    with serving() as server:
        where = Provider.objects.create(name="main", kind=before, base_url=f"{server.url}/v1", api_key="made-up")
        wish = 'reason=SECRET-THOUGHT&call=ask_user&args={"question":"Which?"}'
        columns = {"provider_model": wish, "price_in": 0, "price_out": 0, "dialect": {"reasoningBack": True}}
        AgentModel.objects.create(name="first", display_name="first", provider=where, **columns)
        catalogue.refresh()
        run = bench.ask("Hello", model="first")
        assert Turn.objects.get().reasoning
        Provider.objects.filter(pk=where.pk).update(kind=after)
        catalogue.refresh()
        bench.respond(run, kind="CLARIFICATION", answer="x")
        run = bench.wait(run["id"])
        body = server.requests[-1].body
    assert (run["status"], len(models(run))) == ("completed", 2)
    assert "SECRET-THOUGHT" not in str(body.get("messages") or body["input"])


def test_a_run_that_waits_for_a_place_leaves_a_provider_that_is_disabled(bench, provider, requests, monkeypatch):
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_POLL_SECONDS", 0.05)
    Provider.objects.filter(pk=provider.pk).update(max_concurrent=1)
    catalogue.refresh()
    working = bench.start("/wait 60", model="first")["id"]
    until(lambda: requests)
    waits = bench.start("/say done", model="first")["id"]
    until(lambda: bench.engine.process.model_places.providers["main"].waiting == 1)
    Provider.objects.filter(pk=provider.pk).update(enabled=False)
    catalogue.refresh()
    run = bench.wait(waits, timeout=10)
    assert (run["status"], run["resolvedModel"]) == ("completed", "second")
    bench.cancel(working)
    bench.wait(working)


def test_fallbacks_that_are_no_list_of_models_are_none(bench, provider, requests, settings):
    settings.MODEL_ATTEMPTS = 1
    for fallbacks in (5, "second", {"second": 1}, [None, 3, ["second"]], ["first", "gone", ""]):
        requests.clear()
        change("first", parameters={"seed": 13}, fallbacks=fallbacks)
        run = bench.finish("/say done", model="first")
        assert (run["status"], reason(run), len(requests)) == ("failed", "provider_unavailable", 1), fallbacks


@pytest.mark.slow
def test_fallbacks_in_a_cycle_are_asked_once_each(bench, provider, requests, settings):
    settings.MODEL_ATTEMPTS = 2
    names = ["first", "second", "third", "fourth", "fifth"]
    columns = {"provider_model": "demo", "price_in": 0, "price_out": 0, "provider": provider}
    for name in names[3:]:
        AgentModel.objects.create(name=name, display_name=name, **columns)
    for name in names:
        change(name, parameters={"seed": 13}, fallbacks=[*names, *names])
    run = bench.finish("/say done", model="third")
    assert run["status"] == "failed"
    order = ["third", "first", "second", "fourth", "fifth"]
    assert [request.model.name for request in requests] == [name for name in order for _ in range(2)]


def test_each_request_costs_what_its_model_costs(bench, provider, requests, settings):
    settings.MODEL_ATTEMPTS = 1
    change("first", parameters={"seed": 13}, price_out=1_000_000, fallbacks=["second"])
    change("second", price_out=3_000_000, max_output_tokens=1000)
    run = bench.finish("/usage 0 1000\n/say done", model="first")
    assert (run["status"], run["resolvedModel"], run["totalCreditsUsed"]) == ("completed", "second", 3)
    run = bench.finish("/usage 0 1000\n/say done", model="first", maxCredits=1.5)
    assert (run["status"], 1.4 < run["totalCreditsUsed"] <= 1.5) == ("completed", True)
    assert requests[-1].max_output_tokens < 500
    run = bench.finish("/usage 0 1000\n/say done", model="first", maxCredits=0.5)
    assert (run["errorCode"], run["totalCreditsUsed"], len(requests)) == ("BUDGET_EXCEEDED", 0, 5)
