"""Every invariant reports its violation, and reports nothing for correct data."""

from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from chats.models import Chat
from config.kernel import clock
from config.kernel.ids import new_id
from credits.models import Account, EntryType, LedgerEntry
from runs.lifecycle import invariants
from runs.models import Run, RunEvent, ToolInvocation, Turn, Waitpoint
from tests import factories
from tests.driver import until
from tests.factories import force_update
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def old_endpoint(user):
    """The user has an endpoint that is much older than the runs. Nothing is sent."""
    endpoint = factories.EndpointFactory(user=user)
    Endpoint.objects.update(updated_at=clock.now() - timedelta(hours=1))
    return endpoint


@pytest.fixture
def ended(old_endpoint, bench) -> Run:
    """A completed run with one call of each outcome."""
    run = bench.finish('/call calculate {"expression": "1"}\n/call calculate {"expression": "1/0"}\n/say done')
    assert run["status"] == "completed"
    return Run.objects.get(pk=run["id"])


@pytest.fixture
def waiting(old_endpoint, bench) -> Run:
    run = bench.ask('/call draw_chart {"title": "T", "series": [1]}')
    return Run.objects.get(pk=run["id"])


def found() -> list[str]:
    return invariants.violations()


def test_a_running_service_violates_no_invariant(old_endpoint, bench):
    bench.finish("Hello")
    bench.finish("/say so far\n/fail broken")
    first = bench.ask("/ask Which?")
    bench.start("later", first["chatId"], onActiveRun="enqueue")
    approved = bench.ask('/call draw_chart {"title": "T", "series": [1]}')
    bench.respond(approved, kind="CREDIT_APPROVAL", approved=True)
    bench.wait(approved["id"])
    bench.cancel(bench.ask("/ask Which?")["id"])
    running = bench.start("/stream 400 20")
    until(lambda: Run.objects.get(pk=running["id"]).unrecorded_text)
    assert found() == []
    bench.cancel(running["id"])
    bench.wait(running["id"])
    out = StringIO()
    call_command("check_invariants", stdout=out)
    assert "All invariants hold." in out.getvalue()


def test_the_command_prints_violations_and_fails(ended):
    Chat.objects.update(active_run_id=ended.pk)
    out = StringIO()
    with pytest.raises(CommandError, match="1 violation found"):
        call_command("check_invariants", stdout=out)
    assert ended.chat_id in out.getvalue()


def entry(run: Run, type: EntryType, amount: int, **fields: Any) -> None:
    LedgerEntry.objects.create(
        account_id=run.user_id, type=type, amount=amount, run_id=run.pk, cause=new_id("test"), **fields
    )


def event(run: Run, type: str, data: str, **fields: Any) -> None:
    RunEvent.objects.create(run=run, index=run.last_stream_index + 1, type=type, data=data, **fields)
    Run.objects.filter(pk=run.pk).update(last_stream_index=run.last_stream_index + 1)


def repeat(run: Run, type: str, **filters: Any) -> None:
    latest = RunEvent.objects.filter(run=run, type=type, **filters).latest("index")
    event(run, type, latest.data, final=latest.final)


def deliver(run: Run, type: str, body: str = "{}") -> None:
    Delivery.objects.create(
        event_id=new_id("evt"),
        endpoint=Endpoint.objects.get(),
        user_id=run.user_id,
        event_type=type,
        run_id=run.pk,
        chat_id=run.chat_id,
        body=body,
    )


def update(run: Run, **changes: Any) -> None:
    force_update(Run.objects.filter(pk=run.pk), **changes)


LONG_AGO = timedelta(days=1)
BREAKS_ENDED: dict[str, Callable[[Run], Any]] = {
    "has an unknown status": lambda run: update(run, status="lost"),
    "a tool call of it has not": lambda run: force_update(
        ToolInvocation.objects.filter(call_index=2), status="PENDING"
    ),
    "has no finishedAt": lambda run: update(run, finished_at=None),
    "owns a run that is not running": lambda run: update(run, worker_id="wrk_1"),
    "waits for room, but is not queued": lambda run: update(run, throttled=True),
    "waits, but its end was requested": lambda run: update(run, status="waiting", cancel_requested_at=run.created_at),
    "waits, but no waitpoint is open": lambda run: update(run, status="waiting"),
    "no sweep will find it": lambda run: update(run, status="running", due_at=None),
    "no worker took the run over": lambda run: update(
        run, status="running", worker_id="wrk_1", updated_at=run.updated_at - LONG_AGO
    ),
    "was not given up": lambda run: update(run, status="running", lease_losses=9, updated_at=run.updated_at - LONG_AGO),
    "not one of its live runs": lambda run: Chat.objects.update(active_run_id=run.pk),
    "not its chat's active one": lambda run: update(run, status="queued"),
    "in line behind no live run": lambda run: update(run, status="queued", blocked=True),
    "or there is a gap": lambda run: RunEvent.objects.filter(run=run, index=2).delete(),
    "the run has not ended with it": lambda run: repeat(run, "run.status"),
    "run is completed, but its stream does not end so": lambda run: RunEvent.objects.update(final=False),
    "run is failed, but its stream does not end so": lambda run: update(run, status="failed"),
    "last status is completed, but the run is not": lambda run: update(run, status="running"),
    "started after its result": lambda run: repeat(run, "tool.completed"),
    "have a result event": lambda run: RunEvent.objects.filter(type="tool.completed", run=run)[0].delete(),
    "not its number of calls": lambda run: update(run, tool_invocation_count=9),
    "more than one webhook event reports the run's end": lambda run: deliver(run, "agent.completed"),
    "a webhook says agent.failed": lambda run: deliver(run, "agent.failed"),
    "more than one webhook event reports the call's end": lambda run: deliver(
        run, "tool.completed", Delivery.objects.get(event_type="tool.completed").body
    ),
    "but has 0 deliveries": lambda run: Delivery.objects.filter(event_type="agent.started").delete(),
    "the hold is open, but its run has ended": lambda run: entry(run, EntryType.HOLD, 5),
    "was charged more than once": lambda run: entry(
        run,
        EntryType.CAPTURE,
        5,
        invocation_id=ToolInvocation.objects.get(status="COMPLETED").pk,
        against=LedgerEntry.objects.filter(type=EntryType.USAGE).first(),
    ),
    "not what it was charged": lambda run: ToolInvocation.objects.update(credit_used=1),
    "turns are not what it was charged for": lambda run: Turn.objects.filter(index=1).update(cost=1),
    "the ledger says": lambda run: Account.objects.update(balance=1),
}


def test_every_violation_of_an_ended_run_is_found(ended, bench):
    bench.engine.stop(0)
    assert found() == []
    for violation, break_it in BREAKS_ENDED.items():
        with transaction.atomic():
            break_it(ended)
            lines = found()
            transaction.set_rollback(True)
        assert any(violation in line for line in lines), (violation, lines)
    assert found() == []


def test_a_run_whose_events_were_pruned_violates_no_invariant(ended, bench):
    bench.engine.stop(0)
    update(ended, finished_at=ended.finished_at - timedelta(days=3))
    RunEvent.objects.filter(run=ended, index=2).delete()
    assert any("there is a gap" in line for line in found()), "the stream of an old run is checked until it is pruned"
    RunEvent.objects.all().delete()
    assert found() == []


def test_a_young_run_without_events_is_found(ended, bench):
    bench.engine.stop(0)
    RunEvent.objects.all().delete()
    assert any("there is a gap" in line for line in found())


def test_an_open_waitpoint_of_a_run_that_does_not_wait_is_found(waiting, bench):
    bench.engine.stop(0)
    assert found() == []
    update(waiting, status="queued", finished_at=waiting.created_at)
    lines = found()
    assert any("a waitpoint is open, but the run does not wait" in line for line in lines)
    assert any("has a finishedAt, but has not ended" in line for line in lines)
    force_update(Waitpoint.objects.all(), status="EXPIRED")
    assert not any("a waitpoint is open" in line for line in found())


def test_runs_of_a_restored_copy_may_wait_for_workers(ended, bench):
    bench.engine.stop(0)
    update(ended, status="running", worker_id="wrk_1", updated_at=ended.updated_at - LONG_AGO)
    late = "no worker took the run over"
    assert any(late in line for line in found())
    assert not any(late in line for line in invariants.violations(workers=False))


def test_a_long_list_of_violations_is_cut(ended, bench):
    bench.engine.stop(0)
    for _ in range(invariants.MOST + 5):
        entry(ended, EntryType.HOLD, 5)
    lines = [line for line in found() if "the hold is open" in line]
    assert len(lines) == invariants.MOST + 1
    assert lines[-1].startswith("… and more")
