"""A cancel that was accepted ends the run, whatever its worker does at that moment."""

from typing import Any

import pytest

from credits.models import Account, LedgerEntry
from runs import lifecycle
from runs.models import Run
from tests.driver import until

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '/call calculate {"expression": "1"}'


@pytest.fixture(autouse=True)
def nothing_is_held(laws: None) -> Any:
    yield
    assert Account.objects.get().held == 0


@pytest.mark.parametrize(
    ("transition", "script"),
    [
        ("open_waitpoint", "/ask Which?"),
        ("record_turn", f"/say one\n{CALL}\n/say two"),
        ("record_call_result", f"/say one\n{CALL}\n/say two"),
        ("hold_turn", "/say one"),
        ("complete", "/say one"),
        ("end_request", "/say one\n/wait 0.5\n/cut\n/say two"),
    ],
)
def test_a_cancel_just_before_a_transition_is_not_lost(bench, monkeypatch, settings, transition, script):
    # The heartbeat does not see it first.
    bench.engine.request_cancel = lambda run_ids: None
    move = getattr(lifecycle, transition)

    def late(run: Run, *args: Any, **kwargs: Any) -> Any:
        lifecycle.request_cancel(run.pk)
        return move(run, *args, **kwargs)

    monkeypatch.setattr(lifecycle, transition, late)
    run = bench.finish(script)
    assert (run["status"], run["pendingWaitpoint"]) == ("cancelled", None)
    assert [call["status"] for call in run["toolInvocations"]] == {
        "open_waitpoint": ["CANCELLED"],
        "record_call_result": ["COMPLETED"],
    }.get(transition, [])
    # What was said is kept, and its stream has it too.
    assert lifecycle.streamed_text(Run.objects.get()) == (run["answer"] or "")
    assert (run["answer"] or "").startswith("" if transition in ("open_waitpoint", "hold_turn") else "one")


@pytest.mark.parametrize(("transition", "script"), [("record_turn", f"/say one\n{CALL}"), ("complete", "/say one")])
def test_the_stream_has_the_text_of_a_turn_that_a_cancel_overtakes(bench, monkeypatch, transition, script):
    move = getattr(lifecycle, transition)

    def late(run: Run, *args: Any, **kwargs: Any) -> Any:
        lifecycle.request_cancel(run.pk)
        # The heartbeat sees it while the transition is under way.
        bench.engine.request_cancel([run.pk])
        until(lambda: bench.engine.sessions[run.pk].interruption)
        return move(run, *args, **kwargs)

    for gathered in (bench.engine.process.unwritten, bench.engine.process.begun):
        monkeypatch.setattr(gathered, "seconds", 600)
    monkeypatch.setattr(lifecycle, transition, late)
    run = bench.finish(script)
    assert (run["status"], run["answer"]) == ("cancelled", "one")
    assert lifecycle.streamed_text(Run.objects.get()) == "one"


@pytest.mark.parametrize("end", ["cancel", "time"])
def test_an_end_while_a_turn_is_committed_settles_it_once(bench, monkeypatch, settings, caplog, end):
    record = lifecycle.record_turn

    def interrupted(run: Run, *args: Any, **kwargs: Any) -> Any:
        moved = record(run, *args, **kwargs)
        session = bench.engine.sessions[run.pk]
        if end == "cancel":
            bench.engine.request_cancel([run.pk])
            until(lambda: session.interruption)
        else:
            until(lambda: session.remaining_seconds() < -0.1)
        return moved

    if end == "time":
        settings.RUN_TIMEOUT_SECONDS = 2
    monkeypatch.setattr(lifecycle, "record_turn", interrupted)
    run = bench.finish(f"/usage 1000 2000\n/say one\n{CALL}\n/say two")
    assert (run["status"], run["errorCode"]) == (("cancelled", None) if end == "cancel" else ("failed", "RUN_TIMEOUT"))
    usage = LedgerEntry.objects.get(run_id=run["id"], type="USAGE")
    assert (usage.amount, "partial" in usage.price) == (3_500_000, False)
    assert run["usage"]["turns"] == 1
    assert not [record for record in caplog.records if "unexpected" in record.message or record.exc_info]
