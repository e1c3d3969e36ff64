"""A worker is killed: another continues its run, within fifteen seconds under the default settings."""

import time
from collections.abc import Iterator

import pytest

from tests.faults.load import OWNER, QUICK, SIGNUP_CREDITS, Kind, Load, at_work

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(180)]

TAKEOVER_SECONDS = 15.0
CALL = '/call calculate {"expression": "1+1"}'
SCRIPT = Kind("\n".join([CALL, "/say one", CALL, "/stream 40 100", CALL, "/say {result} is the end"]), "is the end")
LONG = Kind("/stream 100 50\n/say and the end", "and the end")


@pytest.fixture
def load() -> Iterator[Load]:
    with at_work(environment={"SIGNUP_CREDITS": str(SIGNUP_CREDITS)}) as load:
        yield load


def test_another_worker_continues_the_run_within_fifteen_seconds(load: Load) -> None:
    run_id = load.start(SCRIPT)

    def streaming() -> bool:
        # In this order: the second turn has text too.
        return turns() == 2 and load.sql("SELECT unrecorded_text FROM runs_run WHERE id = %s", run_id)[0][0]

    def turns() -> int:
        return int(load.sql("SELECT count(*) FROM runs_turn WHERE run_id = %s", run_id)[0][0])

    load.stack.wait_for(streaming, what="the third turn's text")
    (pid,) = load.sql("SELECT w.pid FROM runs_worker w JOIN runs_run r ON r.worker_id = w.id WHERE r.id = %s", run_id)[
        0
    ]
    (name,) = [name for name, process in load.stack.processes.items() if process.pid == pid]
    recorded = load.sql("SELECT id, updated_at FROM runs_toolinvocation WHERE run_id = %s ORDER BY 1", run_id)
    assert len(recorded) == 2
    load.stack.kill(name)
    killed = time.monotonic()
    load.stack.wait_for(lambda: load.sql(OWNER, run_id) not in ([], [(pid,)]), TAKEOVER_SECONDS * 2, "the takeover")
    assert time.monotonic() - killed <= TAKEOVER_SECONDS
    load.check()
    run = load.driver.get(run_id)
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"] * 3
    # The earlier records are unchanged: only the third turn was repeated.
    after = load.sql("SELECT id, updated_at FROM runs_toolinvocation WHERE run_id = %s ORDER BY 1", run_id)
    assert after[:2] == recorded
    assert load.sql("SELECT count(*) FROM runs_runevent WHERE run_id = %s AND type = 'message.reset'", run_id) == [(1,)]


def test_a_takeover_waits_for_no_sweep() -> None:
    """The lease alone says when."""
    settings = QUICK | {"config.settings.RUN_SWEEP_SECONDS": "600"}
    with at_work(environment=settings, without=("beat", "maintenance")) as load:
        runs = load.start_all(*[LONG] * 10)
        load.stack.wait_for(lambda: all(load.sql(OWNER, run_id) for run_id in runs), what="the owners of all runs")
        (pid,) = load.sql(OWNER, runs[-1])[0]
        (name,) = [name for name, process in load.stack.processes.items() if process.pid == pid]
        load.stack.kill(name)
        load.check()
        assert load.sql("SELECT count(*) FROM runs_run WHERE lease_losses > 0") > [(0,)]
