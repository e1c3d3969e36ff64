"""Failed requests to models, through the API: what is tried again, what clients see, what it costs."""

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from config.kernel import clock
from credits import sums
from credits.models import LedgerEntry
from runs import catalogue, lifecycle
from runs.errors import FailureReason
from runs.llm.base import ModelError
from runs.llm.demo import DemoModel
from runs.models import AgentModel, ModelAttempt, Provider, Run, ToolInvocation, Turn
from tests.driver import until
from tests.lifecycle.conftest import Bench, joined, vanish

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '/call calculate {"expression": "6*7"}'


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0.02)


def add_model(name: str, **fields: Any) -> AgentModel:
    columns = {"display_name": name, "provider_model": "demo", "price_in": 500_000, "price_out": 1_500_000, **fields}
    model = AgentModel.objects.create(name=name, provider=Provider.objects.get(name="demo"), **columns)
    catalogue.refresh()
    return model


@pytest.fixture
def chain(bench: Bench) -> list[str]:
    """The models ``first`` → ``second`` → ``third``."""
    add_model("third")
    add_model("second")
    add_model("first", fallbacks=["second", "third"])
    return ["first", "second", "third"]


@pytest.fixture
def faults(monkeypatch) -> dict[str, list[ModelError | None]]:
    """What the next requests to a model end with, by its name: an error after some text, or None for the demo's answer.
    The list's last item is for all that follow.
    """
    wanted: dict[str, list[ModelError | None]] = {}
    stream = DemoModel.stream

    async def fail(self: DemoModel, request: Any) -> Any:
        planned = wanted.get(request.model.name) or [None]
        error = planned.pop(0) if len(planned) > 1 else planned[0]
        if error is not None:
            yield f"never mind {request.model.name}"
            raise error
        async for event in stream(self, request):
            yield event

    monkeypatch.setattr(DemoModel, "stream", fail)
    return wanted


def away(**fields: Any) -> ModelError:
    return ModelError(FailureReason.PROVIDER_UNAVAILABLE, status=503, **fields)


def refused() -> ModelError:
    return ModelError(FailureReason.REQUEST_REFUSED, status=400)


def asked(run: dict[str, Any]) -> list[str]:
    """The models of the failed requests, in their order."""
    return [attempt.model for attempt in ModelAttempt.objects.filter(run_id=run["id"])]


def retrying(happened: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [data for kind, data in happened if kind == "model.retrying"]


@pytest.mark.parametrize("code", [429, 503])
def test_a_failure_that_passes_is_tried_again(bench, events, code):
    run = bench.finish(f"/say begun\n/flaky {code} 2 done")
    assert (run["status"], bench.content(run)) == ("completed", "begun\ndone")
    assert run["usage"]["modelRetries"] == 2
    happened = events(run["id"])
    assert joined(happened) == "begun\ndone"
    told = retrying(happened)
    reason = "provider_rate_limited" if code == 429 else "provider_unavailable"
    assert [(event["attempt"], event["reason"], event["model"]) for event in told] == [
        (n, reason, "demo") for n in (1, 2)
    ]
    assert all(set(event) == {"attempt", "reason", "delaySeconds", "model"} for event in told)
    assert all(0 <= event["delaySeconds"] <= 0.02 * 2**n for n, event in enumerate(told))
    assert list(ModelAttempt.objects.values_list("number", "http_status", "turn_index")) == [(1, code, 1), (2, code, 1)]


def test_a_refusal_is_not_tried_again(bench, events):
    for code in (400, 401, 402, 403, 404, 413, 422):
        run = bench.finish(f"/flaky {code} 1 done")
        expected = ("failed", "CONTEXT_LENGTH_EXCEEDED" if code == 413 else "MODEL_ERROR")
        assert (run["status"], run["errorCode"]) == expected, code
        assert run["usage"]["modelRetries"] == 0, code
        assert retrying(events(run["id"])) == [], code
        assert sums.committed(run["id"]) == 0, code


def test_the_attempts_of_a_turn_are_limited(bench, settings, events):
    settings.MODEL_ATTEMPTS = 3
    run = bench.finish("/flaky 503 2 in time")
    assert (run["status"], bench.content(run)) == ("completed", "in time")
    run = bench.finish("/flaky 503 3 too late")
    assert (run["status"], run["errorCode"]) == ("failed", "MODEL_ERROR")
    assert asked(run) == ["demo"] * 3
    last = ModelAttempt.objects.filter(run_id=run["id"]).last()
    assert (last.next_model, last.next_at) == ("", None)
    assert Run.objects.get(pk=run["id"]).failure_reason == "provider_unavailable"
    assert sums.committed(run["id"]) == 0


def test_each_turn_has_its_own_attempts(bench, settings):
    settings.MODEL_ATTEMPTS = 3
    run = bench.finish(f"/flaky 503 2\n{CALL}\n/flaky 429 2\n{CALL}\n/flaky 500 2 done")
    assert (run["status"], run["usage"]["modelRetries"]) == ("completed", 6)
    assert list(ModelAttempt.objects.values_list("turn_index", "number")) == [(t, n) for t in (1, 2, 3) for n in (1, 2)]


def test_nothing_is_repeated_or_charged_twice(bench, events):
    script = f"/usage 1000 0\n/say a\n/flaky 503 2\n{CALL}\n/usage 1000 0\n/say b\n/flaky 429 2 {{result}}"
    run = bench.finish(script)
    assert run["status"] == "completed"
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"]
    assert ToolInvocation.objects.count() == 1
    rows = LedgerEntry.objects.filter(run_id=run["id"], type__in=["CAPTURE", "USAGE"])
    partial = [row.amount for row in rows if row.price.get("partial")]
    assert len(partial) == 4  # each of the failed requests had sent text
    complete = sorted((row.type, row.amount) for row in rows if not row.price.get("partial"))
    assert complete == [("CAPTURE", 100_000)] + [("USAGE", 500_000)] * 2
    assert run["totalCreditsUsed"] == (1_100_000 + sum(partial)) / 1_000_000
    assert joined(events(run["id"])) == bench.content(run) == "a\n\nb\n42"


def test_streamed_text_is_overtaken(bench, events, faults):
    """The text of the failed request reached the stream before the failure."""
    faults["demo"] = [away(), None]
    run = bench.start("/stream 3 0\n/say end")
    run = bench.wait(run["id"])
    happened = events(run["id"])
    assert joined(happened) == bench.content(run)
    assert "never mind" not in bench.content(run)


def test_the_reset_comes_before_the_retry_and_restores_earlier_turns(bench, events, settings):
    settings.MODEL_ATTEMPTS = 2
    run = bench.finish(f"/say first\n{CALL}\n/stream 12 30\n/flaky 503 1 end")
    kinds = [kind for kind, _ in events(run["id"])]
    at = kinds.index("message.reset")
    assert kinds[at : at + 3] == ["message.reset", "message.delta", "model.retrying"]
    assert events(run["id"])[at + 1][1]["text"] == "first"
    assert joined(events(run["id"])) == bench.content(run)
    assert bench.content(run).startswith("first\n\nthe quick")


def test_text_of_the_last_attempt_is_kept(bench, events, settings):
    settings.MODEL_ATTEMPTS = 2
    run = bench.finish("/say half of it\n/cut")
    assert (run["status"], run["errorCode"]) == ("failed", "MODEL_ERROR")
    assert bench.content(run) == joined(events(run["id"])) == "half of it"


@pytest.mark.slow
def test_a_wait_is_as_long_as_the_provider_asks(bench, events, faults, monkeypatch):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_AFTER_MAX_SECONDS", 0.5)
    faults["demo"] = [away(retry_after=0.3), away(retry_after=86_400.0), None]
    begun = time.monotonic()
    run = bench.finish("/say done")
    assert time.monotonic() - begun >= 0.8
    assert [event["delaySeconds"] for event in retrying(events(run["id"]))] == [0.3, 0.5]


def test_a_wait_never_goes_past_the_runs_time(bench, faults, settings):
    settings.RUN_TIMEOUT_SECONDS = 5
    faults["demo"] = [away(retry_after=30.0)]
    begun = time.monotonic()
    run = bench.finish("/say done")
    assert time.monotonic() - begun < 5
    assert (run["status"], run["errorCode"], asked(run)) == ("failed", "MODEL_ERROR", ["demo"])


def test_fallbacks_are_asked_in_order(bench, chain, events, faults, settings):
    settings.MODEL_ATTEMPTS = 2
    faults |= {"first": [away()], "second": [refused()]}
    run = bench.finish("/say done", model="first")
    assert (run["status"], bench.content(run)) == ("completed", "done")
    assert asked(run) == ["first", "first", "second"]
    assert (run["requestedModel"], run["resolvedModel"]) == ("first", "third")
    assert [event["model"] for event in retrying(events(run["id"]))] == ["first", "second", "third"]
    assert [event["delaySeconds"] for event in retrying(events(run["id"]))][1:] == [0, 0]
    assert Turn.objects.get(run_id=run["id"]).model == "third"


@pytest.mark.parametrize(("status", "attempts"), [(429, 3), (402, 1), (400, 1)])
def test_a_used_up_quota_is_tried_again_if_the_status_is_429(bench, chain, faults, settings, status, attempts):
    settings.MODEL_ATTEMPTS = 3
    faults["first"] = [ModelError(FailureReason.PROVIDER_QUOTA_EXCEEDED, status=status)]
    run = bench.finish("/say done", model="first")
    assert (run["status"], run["resolvedModel"]) == ("completed", "second")
    assert asked(run) == ["first"] * attempts


def test_the_run_fails_after_its_last_fallback(bench, chain, faults, settings):
    settings.MODEL_ATTEMPTS = 2
    faults |= {"first": [away()], "second": [refused()], "third": [away()]}
    run = bench.finish("/say done", model="first")
    assert (run["status"], run["errorCode"], run["usage"]["modelRetries"]) == ("failed", "MODEL_ERROR", 4)
    assert asked(run) == ["first", "first", "second", "third", "third"]


def test_the_model_that_answered_is_asked_first_in_the_next_turn(bench, chain, faults, settings):
    settings.MODEL_ATTEMPTS = 1
    faults |= {"first": [away(), None], "second": [None, away(), None]}
    run = bench.finish(f"/say a\n{CALL}\n/say b\n{CALL}\n/say c", model="first")
    assert (run["status"], run["resolvedModel"]) == ("completed", "third")
    assert list(Turn.objects.order_by("index").values_list("model", flat=True)) == ["second", "third", "third"]
    assert asked(run) == ["first", "second"]


def test_a_fallback_that_is_gone_is_passed_over(bench, chain, faults, settings):
    settings.MODEL_ATTEMPTS = 1
    AgentModel.objects.filter(name="second").update(enabled=False)
    catalogue.refresh()
    faults["first"] = [away()]
    run = bench.finish("/say done", model="first")
    assert (run["status"], run["resolvedModel"]) == ("completed", "third")


def test_a_cancel_ends_the_wait(bench, faults):
    faults["demo"] = [away(retry_after=50.0)]
    run = bench.start("/say done")
    until(ModelAttempt.objects.exists)
    begun = time.monotonic()
    bench.cancel(run["id"])
    assert bench.wait(run["id"])["status"] == "cancelled"
    assert time.monotonic() - begun < 1.0
    assert sums.committed(run["id"]) == 0


def wait_of(run: dict[str, Any], seconds: float) -> None:
    """Of the 50 seconds that the run waits for its next request, ``seconds`` are left."""
    due = clock.now() + timedelta(seconds=seconds)
    ModelAttempt.objects.filter(run_id=run["id"]).update(next_at=due, finished_at=due - timedelta(seconds=50))


@pytest.mark.slow
def test_a_shutdown_hands_over_a_run_that_waits(bench, engines, events, faults):
    """The next worker waits for the rest of the time only, and knows the attempts."""
    faults["demo"] = [away(retry_after=50.0), None]
    run = bench.start("/say done")
    until(ModelAttempt.objects.exists)
    first, _ = bench.engine, engines()
    wait_of(run, 2.0)
    first.drain()
    until(lambda: not first.tasks, timeout=10)
    first.stop(0)
    run = bench.wait(run["id"])
    assert (run["status"], run["usage"]["modelRetries"]) == ("completed", 1)
    assert Run.objects.get().lease_losses == 0
    assert joined(events(run["id"])) == bench.content(run) == "done"


@pytest.mark.slow
def test_a_takeover_waits_only_for_the_rest(bench, engines, faults, settings):
    settings.RUN_LEASE_SECONDS = 1
    settings.MODEL_ATTEMPTS = 2
    faults["demo"] = [away(retry_after=50.0), away()]
    run = bench.start("/say done")
    until(ModelAttempt.objects.exists)
    vanish(bench.engine)
    wait_of(run, 3.0)
    engines()
    run = bench.wait(run["id"], timeout=30)
    # The attempt before the takeover counts.
    assert (run["status"], asked(run)) == ("failed", ["demo", "demo"])
    first, second = ModelAttempt.objects.order_by("number")
    assert timedelta(0) <= second.started_at - first.next_at < timedelta(seconds=5)
    assert Run.objects.get().lease_losses == 1


@pytest.mark.parametrize("step", ["end_request", "finish"])
def test_a_failure_whose_answer_was_lost_is_recorded_once(bench, faults, monkeypatch, settings, step):
    """The commit succeeds, but the worker is told of an error and repeats the step."""
    settings.MODEL_ATTEMPTS = 2
    faults["demo"] = [away()]
    original, lost = getattr(lifecycle, step), []

    def lose(*args: Any, **kwargs: Any) -> Any:
        moved = original(*args, **kwargs)
        if not lost:
            lost.append(step)
            raise OperationalError("the connection was lost")
        return moved

    monkeypatch.setattr(lifecycle, step, lose)
    run = bench.finish("/say done")
    assert (run["status"], run["errorCode"], asked(run)) == ("failed", "MODEL_ERROR", ["demo"] * 2)
    assert lost
    assert lifecycle.violations() == []


def test_usage_is_the_sum_of_the_turns(bench):
    run = bench.finish(f"/usage 10 20\n{CALL}\n/flaky 503 1\n/usage 30 40\n/say done")
    expected = {"inputTokens": 40, "cachedInputTokens": 0, "outputTokens": 60, "turns": 2, "modelRetries": 1}
    assert run["usage"] == expected


def test_an_answer_at_the_output_limit_completes(bench):
    run = bench.finish("/say cut\n/length")
    assert (run["status"], run["finishReason"]) == ("completed", "length")
    assert bench.finish("/reason think\n/say done")["finishReason"] == "stop"
