"""Each database step of a run is committed, but its answer is lost with the connection: it still happens once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection

from runs.engine import engine as engines_module
from runs.lifecycle import invariants
from runs.lifecycle.runs import streamed_text
from runs.models import Run
from tests.driver import until

pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = "\n".join(
    [
        "/say One moment.",
        '/call calculate {"expression": "1+1"}',
        '/call calculate {"expression": "2+2"}',
        "/stream 12 20",
        '/call draw_chart {"title": "T", "series": [1, 2]}',
        "/say The chart is done.",
        "/stream 3 60",
    ]
)
STEPS = (
    "claim_and_load",
    "refusal",
    "write_deltas",
    "record_turn",
    "record_result",
    "exceeds_budget",
    "open_waitpoint",
    "dispatch",
)


class Loser:
    """Loses the answer of some steps named ``name``: the transaction is committed, the caller gets an error."""

    def __init__(self, name: str, which: Callable[[int], bool]) -> None:
        self.name, self.which = name, which
        self.seen = self.lost = 0
        self.original = engines_module._attempt

    def __call__(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if step.__name__ != self.name:
            return self.original(step, args, kwargs)

        def answered_by_nobody(*args: Any, **kwargs: Any) -> Any:
            answer = step(*args, **kwargs)
            self.seen += 1
            if self.which(self.seen):
                self.lost += 1
                connection.close()
                raise OperationalError("server closed the connection unexpectedly")
            return answer

        return self.original(answered_by_nobody, args, kwargs)


def see_through(bench: Any) -> dict[str, Any]:
    run = bench.wait(bench.start(SCRIPT)["id"], "waiting")
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    return bench.wait(run["id"])


@pytest.mark.parametrize("step", STEPS)
def test_every_step_happens_once(bench, events, monkeypatch, step):
    loser = Loser(step, lambda number: number % 2 == 1)
    monkeypatch.setattr(engines_module, "_attempt", loser)
    run = see_through(bench)
    assert loser.lost
    assert (run["status"], run["errorCode"]) == ("completed", None)
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"] * 3
    assert [call["creditUsed"] for call in run["toolInvocations"]] == [0.1, 0.1, 12]
    content = bench.content(run)
    assert content.startswith("One moment.\n\nthe quick")
    assert content.endswith("The chart is done.\nthe quick brown")
    events(run["id"])
    assert streamed_text(Run.objects.get(pk=run["id"])) == content
    assert invariants.violations() == []


@pytest.mark.parametrize("step", ["fail", "finish_cancelled"])
def test_every_end_happens_once(bench, monkeypatch, step):
    loser = Loser(step, lambda number: number == 1)
    monkeypatch.setattr(engines_module, "_attempt", loser)
    run = bench.start("/say so far\n/wait 30" if step == "finish_cancelled" else "/say so far\n/fail broken")
    if step == "finish_cancelled":
        until(lambda: Run.objects.get(pk=run["id"]).unrecorded_text)
        bench.cancel(run["id"])
    run = bench.wait(run["id"])
    assert loser.lost == 1
    assert run["status"] == ("cancelled" if step == "finish_cancelled" else "failed")
    assert invariants.violations() == []


def test_a_cancel_that_comes_while_the_journal_is_read_anew_ends_the_run(bench, monkeypatch):
    lose, asked = Loser("record_turn", lambda number: number == 1), []

    def attempt(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if step.__name__ == "reload" and not asked:
            asked.append(args[0].pk)
            bench.cancel(args[0].pk)
            until(lambda: bench.engine.loops[asked[0]].cancel_requested)
        return lose(step, args, kwargs)

    monkeypatch.setattr(engines_module, "_attempt", attempt)
    run = bench.wait(bench.start('/call calculate {"expression": "1+1"}\n/wait 30')["id"])
    assert (lose.lost, asked) == (1, [run["id"]])
    assert run["status"] == "cancelled"
    assert Run.objects.get().lease_losses == 0
    assert invariants.violations() == []


def test_a_run_that_its_worker_does_not_carry_is_taken_up(bench, monkeypatch):
    """What breaks between a claim and its run's loop leaves the run owned by a live worker that knows nothing of it."""
    original, broken = engines_module.claim_and_load, []

    def claim_and_break(run_id: str, worker_id: str) -> Any:
        found = original(run_id, worker_id)
        if not broken:
            broken.append(run_id)
            raise RuntimeError("out of memory, say")
        return found

    monkeypatch.setattr(engines_module, "claim_and_load", claim_and_break)
    run = bench.finish("Hello")
    assert broken == [run["id"]]
    assert run["status"] == "completed"
    assert Run.objects.get(pk=run["id"]).lease_losses == 1
    assert invariants.violations() == []


def test_a_run_that_is_dropped_each_time_is_given_up(bench, settings, monkeypatch):
    settings.RUN_LEASE_LOSSES_MAX = 3

    def break_always(run_id: str, worker_id: str) -> Any:
        original(run_id, worker_id)
        raise RuntimeError("out of memory, say")

    original = engines_module.claim_and_load
    monkeypatch.setattr(engines_module, "claim_and_load", break_always)
    run = bench.finish("Hello")
    assert (run["status"], run["errorCode"]) == ("failed", "WORKER_LOST")
    assert invariants.violations() == []
