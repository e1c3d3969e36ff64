"""Tests of RUN_CALLS_MAX, the number of calls of a run."""

import pytest

from runs import lifecycle
from runs.models import ToolInvocation
from tests.driver import until
from tests.lifecycle.conftest import vanish

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '/call calculate {"expression": "1"}'


def turn(calls: int, text: str) -> str:
    return "\n".join(["/usage 1000 0", *[CALL] * calls, f"/say {text}"])


def test_a_run_may_make_as_many_calls_as_the_limit(bench, monkeypatch):
    monkeypatch.setattr("runs.engine.loop.RUN_CALLS_MAX", 3)
    run = bench.finish("\n".join([turn(2, "a"), turn(1, "b")]))
    assert run["status"] == "completed"
    assert len(run["toolInvocations"]) == 3
    (summary,) = bench.client.get("/api/v1/runs").json()["items"]
    assert summary["toolInvocationCount"] == 3


def test_a_turn_beyond_the_limit_fails_the_run_and_none_of_its_calls_is_stored(bench, monkeypatch):
    """The model's work is charged nevertheless."""
    monkeypatch.setattr("runs.engine.loop.RUN_CALLS_MAX", 3)
    run = bench.finish(f"/say before\n{turn(2, 'a')}\n{turn(2, 'b')}")
    assert (run["status"], run["errorCode"]) == ("failed", "CALL_LIMIT_EXCEEDED")
    assert "3" in run["errorMessage"]
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"] * 2
    assert bench.content(run).startswith("before")
    assert lifecycle.violations() == []
    assert bench.credits()["held"] == "0"
    # Two calls for 0.1 each, and two turns with 1,000 tokens for 0.5 each.
    assert run["totalCreditsUsed"] == 1.2


@pytest.mark.slow
def test_the_calls_before_a_takeover_count(bench, engines, monkeypatch):
    monkeypatch.setattr("runs.engine.loop.RUN_CALLS_MAX", 3)
    run = bench.start(f"{turn(2, 'a')}\n/stream 40 50\n{turn(2, 'b')}")
    until(lambda: ToolInvocation.objects.filter(status="COMPLETED").count() == 2)
    vanish(bench.engine)
    engines()
    run = bench.wait(run["id"])
    assert (run["errorCode"], len(run["toolInvocations"])) == ("CALL_LIMIT_EXCEEDED", 2)
