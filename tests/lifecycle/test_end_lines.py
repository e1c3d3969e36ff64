"""Each run that ends has one INFO line, whatever ends it."""

import logging
import re
from datetime import timedelta

import pytest
from django.db import transaction

from config.kernel import clock
from runs import catalogue, lifecycle
from runs.catalogue import agents
from runs.lifecycle import line, sweeps
from runs.models import Run, Waitpoint
from tests import factories
from tests.driver import until

pytestmark = pytest.mark.django_db(transaction=True)

CANARY = "canary-4711"
LINE = re.compile(
    r"run (\S+) ended: (\w+), error (\S+), model (\S+), agent (\S+), "
    r"([\d.]+) s, (\d+) turns, (\d+) tool calls"
)


@pytest.fixture
def ends(caplog):
    """The fields of the lines of a run, without its id."""
    caplog.set_level(logging.INFO)

    def lines(run_id: str) -> list[tuple[str, ...]]:
        found = [LINE.fullmatch(record.getMessage()) for record in caplog.records if record.levelno == logging.INFO]
        return [match.groups()[1:] for match in found if match and match[1] == run_id]

    return lines


def test_a_completed_run_has_a_line_of_what_it_did(bench, ends, caplog):
    script = f'/call calculate {{"expression": "1+1"}}\n/call calculate {{"expression": "1/0"}}\n/say {CANARY}'
    run = bench.finish(script)
    until(lambda: ends(run["id"]))
    ((status, error, model, agent, seconds, turns, calls),) = ends(run["id"])
    assert (status, error, model, agent, turns, calls) == ("completed", "-", "demo", "-", "2", "2")
    assert float(seconds) >= 0
    assert CANARY not in caplog.text


def test_a_failed_run_has_a_line_with_its_error_and_agent(bench, ends, caplog):
    agents.save("support", display_name="Support", instructions=CANARY)
    catalogue.refresh()
    run = bench.finish(f"/say {CANARY}\n/fail {CANARY}", agent="support")
    until(lambda: ends(run["id"]))
    ((status, error, _, agent, *_),) = ends(run["id"])
    assert (status, error, agent) == ("failed", "MODEL_ERROR", "support@1")
    assert CANARY not in caplog.text


def test_runs_that_callers_and_sweeps_end_have_one_line(bench, ends, user):
    asked = bench.ask("/ask Which?")
    queued = bench.start("later", asked["chatId"], onActiveRun="enqueue")
    expired = bench.ask("/ask Which?")
    worn = factories.RunFactory(
        chat__user=user, status="running", due_at=clock.now(), lease_losses=line.RUN_LEASE_LOSSES_MAX
    )
    Waitpoint.objects.filter(run_id=expired["id"]).update(expires_at=clock.now() - timedelta(seconds=1))
    bench.cancel(queued["id"])
    bench.cancel(asked["id"])
    bench.cancel(asked["id"])
    sweeps.expire_waitpoints()
    lifecycle.reap_workers()
    until(lambda: all(map(ends, (asked["id"], queued["id"], expired["id"], worn.pk))))
    assert [line[:2] for line in ends(asked["id"]) + ends(queued["id"])] == [("cancelled", "-")] * 2
    assert [line[:2] for line in ends(expired["id"])] == [("failed", "WAITPOINT_EXPIRED")]
    assert [line[:2] for line in ends(worn.pk)] == [("failed", "WORKER_LOST")]


def test_runs_in_line_of_a_deleted_chat_have_one_line_each(bench, ends):
    asked = bench.ask("/ask Which?")
    line = [bench.start("later", asked["chatId"], onActiveRun="enqueue")["id"] for _ in range(2)]
    bench.http.client.delete(f"/api/v1/chats/{asked['chatId']}")
    until(lambda: all(map(ends, (asked["id"], *line))))
    assert [len(ends(run_id)) for run_id in (asked["id"], *line)] == [1, 1, 1]
    assert ends(line[0])[0][-1] == "0"


def test_a_transition_that_is_rolled_back_has_no_line(ends, user):
    run = factories.RunFactory(chat__user=user, status="waiting")
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        lifecycle.request_cancel(run.pk)
        raise ZeroDivisionError
    assert ends(run.pk) == []
    assert Run.objects.get(pk=run.pk).status == "waiting"
