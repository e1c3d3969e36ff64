"""The connection breaks after the commit of a database step of a run: the step still happens once."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection

from credits import ledger
from credits.models import LedgerEntry
from runs import catalogue, lifecycle
from runs.engine import requests, session
from runs.models import Run, Tool, Waitpoint
from tests.driver import until
from tests.factories import UserFactory
from tests.webhooks.receiver import answer, receiving

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
    (session, "claim_and_load"),
    (requests, "allow"),
    (lifecycle, "append_text"),
    (lifecycle, "record_turn"),
    (lifecycle, "record_call_result"),
    (lifecycle, "refusal"),
    (lifecycle, "open_waitpoint"),
    (lifecycle, "dispatch_calls"),
    (lifecycle, "complete"),
)


class Loser:
    """Loses the result of some calls of a step: the transaction is committed, but the caller gets an error."""

    def __init__(self, monkeypatch: Any, module: Any, name: str, which: Callable[[int], bool]) -> None:
        self.step, self.which = getattr(module, name), which
        self.seen = self.lost = 0
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.step(*args, **kwargs)
        self.seen += 1
        if self.which(self.seen):
            self.lost += 1
            connection.close()
            raise OperationalError("server closed the connection unexpectedly")
        return answer


def see_through(bench: Any) -> dict[str, Any]:
    run = bench.wait(bench.start(SCRIPT)["id"], "waiting")
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    return bench.wait(run["id"])


@pytest.mark.parametrize(("module", "step"), STEPS, ids=[step for _, step in STEPS])
def test_every_step_happens_once(bench, events, monkeypatch, module, step):
    loser = Loser(monkeypatch, module, step, lambda number: number % 2 == 1)
    run = see_through(bench)
    assert loser.lost
    assert (run["status"], run["errorCode"]) == ("completed", None)
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"] * 3
    assert [call["creditUsed"] for call in run["toolInvocations"]] == [0.1, 0.1, 12]
    content = bench.content(run)
    assert content.startswith("One moment.\n\nthe quick")
    assert content.endswith("The chart is done.\nthe quick brown")
    events(run["id"])
    assert lifecycle.streamed_text(Run.objects.get(pk=run["id"])) == content
    assert lifecycle.violations() == []


def test_a_pause_for_want_of_credits_happens_once(bench, monkeypatch, user):
    ledger.adjust(
        user.pk, 100_000 - ledger.account_for(user.pk).available, reason="few", staff=UserFactory(is_staff=True)
    )
    pause = Loser(monkeypatch, lifecycle, "pause", lambda number: number == 1)
    resume = Loser(monkeypatch, lifecycle, "resume_paid", lambda number: number == 1)
    run = bench.ask("/say ok", onCreditsExhausted="wait")
    ledger.grant(user.pk, 5_000_000, cause="paid")
    run = bench.wait(run["id"])
    assert (run["status"], pause.lost, resume.lost) == ("completed", 1, 1)
    assert Waitpoint.objects.filter(run=run["id"]).count() == 1
    assert lifecycle.violations() == []


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_every_final_step_happens_once(bench, monkeypatch, end):
    loser = Loser(monkeypatch, lifecycle, "finish", lambda number: number == 1)
    run = bench.start("/say so far\n/wait 30" if end == "cancelled" else "/say so far\n/fail broken")
    if end == "cancelled":
        until(lambda: Run.objects.get(pk=run["id"]).unrecorded_text)
        bench.cancel(run["id"])
    run = bench.wait(run["id"])
    assert loser.lost == 1
    assert run["status"] == end
    assert lifecycle.violations() == []


def test_a_cancel_during_the_reload_of_the_journal_ends_the_run(bench, monkeypatch):
    lose, asked = Loser(monkeypatch, lifecycle, "record_turn", lambda number: number == 1), []
    original = session.reload

    def reload(run: Run) -> Any:
        if not asked:
            asked.append(run.pk)
            bench.cancel(run.pk)
            until(lambda: bench.engine.sessions[run.pk].interruption)
        return original(run)

    monkeypatch.setattr(session, "reload", reload)
    run = bench.wait(bench.start('/call calculate {"expression": "1+1"}\n/wait 30')["id"])
    assert (lose.lost, asked) == (1, [run["id"]])
    assert run["status"] == "cancelled"
    assert Run.objects.get().lease_losses == 0
    assert lifecycle.violations() == []


def test_a_lost_answer_interrupts_no_other_call(bench, monkeypatch):
    """Several calls of a turn are under way, of tools that must not be called twice."""
    lost = threading.Event()

    def answer_afterwards(*arguments: Any) -> None:
        assert lost.wait(30)
        answer(200, b'{"result": "ok"}')(*arguments)

    def lose(number: int) -> bool:
        # The first result, and then every second one.
        lost.set()
        return number % 2 == 1

    with receiving(answer(200, b'{"result": "ok"}')) as quick, receiving(answer_afterwards) as slow:
        for name, receiver in (("quick", quick), ("slow", slow)):
            columns = {"approval": "never", "price": 1_000_000, "input_schema": {"type": "object"}}
            Tool.objects.create(name=name, display_name=name, node_type="http", url=receiver.url, **columns)
        until(lambda: "slow" in catalogue.remembered().tools)
        loser = Loser(monkeypatch, lifecycle, "record_call_result", lose)
        run = bench.finish("/call quick {}\n/call slow {}\n/call slow {}\n/say {result}")
        assert (len(quick.requests), len(slow.requests)) == (1, 2)
    assert run["status"] == "completed"
    assert [(call["status"], call["creditUsed"]) for call in run["toolInvocations"]] == [("COMPLETED", 1)] * 3
    assert loser.lost >= 2
    assert Run.objects.get().lease_losses == 0
    assert lifecycle.violations() == []


@pytest.mark.parametrize("step", ["record_turn", "dispatch_calls"])
def test_a_call_whose_dispatch_was_not_confirmed_is_made(bench, monkeypatch, step):
    """The tool must not be called twice, but the worker knows that it has not begun the call."""
    with receiving(answer(200, b'{"result": "ok"}')) as server:
        columns = {"approval": "never", "price": 1_000_000, "input_schema": {"type": "object"}}
        Tool.objects.create(name="book", display_name="Book", node_type="http", url=server.url, **columns)
        until(lambda: "book" in catalogue.remembered().tools)
        # So that the second call is dispatched by itself.
        bench.engine.process.tool_places.per_user = 1
        loser = Loser(monkeypatch, lifecycle, step, lambda number: number == 1)
        run = bench.finish("/call book {}\n/call book {}\n/say done")
        keys = [request.header("Idempotency-Key") for request in server.requests]
    assert loser.lost == 1
    assert [(call["status"], call["errorCode"]) for call in run["toolInvocations"]] == [("COMPLETED", None)] * 2
    assert sorted(keys) == sorted(call["id"] for call in run["toolInvocations"])
    assert lifecycle.violations() == []


@pytest.mark.parametrize("more", [[], [" and"]], ids=["one flush", "two flushes"])
def test_a_session_that_is_behind_its_stream_reads_the_run_again(bench, events, monkeypatch, more):
    """The answers to flushes are lost in a way that is not recognised. The worker still owns the run."""
    append, calls = lifecycle.append_text, []

    def append_and_lose(batch: Any) -> Any:
        written = append(batch)
        calls.append(written)
        if len(calls) == 1:
            for text in more:
                append([(run, text) for run in written.values()])
            raise RuntimeError("an answer that says nothing")
        return written

    monkeypatch.setattr(lifecycle, "append_text", append_and_lose)
    run = bench.finish("/stream 30 40\n/say the end")
    assert (run["status"], run["errorCode"]) == ("completed", None)
    stored = Run.objects.get()
    assert (stored.lease_token, stored.lease_losses) == (1, 0)
    assert lifecycle.streamed_text(stored) == bench.content(run)
    assert "message.reset" in [kind for kind, _ in events(run["id"])]
    # Both requests are charged.
    partial, whole = LedgerEntry.objects.filter(run_id=run["id"], type="USAGE").order_by("created_at", "id")
    assert (partial.price.get("partial"), whole.price.get("partial")) == (True, None)
    assert 0 < partial.amount < whole.amount
    assert lifecycle.violations() == []


def test_a_cancel_that_is_behind_the_database_charges_what_was_used(bench, monkeypatch):
    refused, finish = [], lifecycle.finish

    def refuse_once(run: Run, **kwargs: Any) -> Any:
        if not refused:
            refused.append(run.pk)
            raise lifecycle.LeaseLost(run.pk)
        return finish(run, **kwargs)

    monkeypatch.setattr(lifecycle, "finish", refuse_once)
    run = bench.start("/stream 100 10\n/wait 30")
    until(lambda: len(lifecycle.streamed_text(Run.objects.get())) > 400)
    bench.cancel(run["id"])
    run = bench.wait(run["id"])
    assert (run["status"], refused) == ("cancelled", [run["id"]])
    usage = LedgerEntry.objects.get(run_id=run["id"], type="USAGE")
    assert (usage.price["partial"], usage.amount > 100 * 1500) == (True, True)
    assert lifecycle.violations() == []


@pytest.mark.parametrize("limit", ["budget", "credits"])
def test_a_hold_whose_answer_was_lost_is_found_again(bench, monkeypatch, user, limit):
    if limit == "credits":
        few = 1_000_000 - ledger.account_for(user.pk).available
        ledger.adjust(user.pk, few, reason="few", staff=UserFactory(is_staff=True))
    loser = Loser(monkeypatch, requests, "allow", lambda number: number == 1)
    run = bench.finish("/usage 0 1000000\n/say ok\n/length", **({"maxCredits": 1} if limit == "budget" else {}))
    assert (loser.lost, run["status"], run["limitedBy"]) == (1, "completed", limit)
    assert 0.9 < run["totalCreditsUsed"] <= 1
    assert lifecycle.violations() == []


def test_a_run_that_its_worker_does_not_execute_is_taken_over(bench, monkeypatch):
    """An error after the claim leaves the run owned by a live worker that does not execute it."""
    original, broken = session.claim_and_load, []

    def claim_and_break(run_id: str, worker_id: str) -> Any:
        found = original(run_id, worker_id)
        if not broken:
            broken.append(run_id)
            raise RuntimeError("out of memory, say")
        return found

    monkeypatch.setattr(session, "claim_and_load", claim_and_break)
    run = bench.finish("Hello")
    assert broken == [run["id"]]
    assert run["status"] == "completed"
    assert Run.objects.get(pk=run["id"]).lease_losses == 1
    assert lifecycle.violations() == []


def test_a_run_that_is_always_dropped_fails(bench, monkeypatch):
    monkeypatch.setattr("runs.lifecycle.line.RUN_LEASE_LOSSES_MAX", 3)

    def break_always(run_id: str, worker_id: str) -> Any:
        original(run_id, worker_id)
        raise RuntimeError("out of memory, say")

    original = session.claim_and_load
    monkeypatch.setattr(session, "claim_and_load", break_always)
    run = bench.finish("Hello")
    assert (run["status"], run["errorCode"]) == ("failed", "WORKER_LOST")
    assert lifecycle.violations() == []
