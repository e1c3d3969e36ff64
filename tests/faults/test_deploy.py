"""Consecutive deploys under load: runs move to another worker at once, and none counts as lost."""

from collections.abc import Iterator

import pytest

from tests.faults.load import OWNER, QUICK, Kind, Load, at_work

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

# The lease is longer than the test: a run that waited for its expiry would not end in time.
PATIENT = QUICK | {"RUN_LEASE_SECONDS": "300", "RUN_SHUTDOWN_GRACE_SECONDS": "1"}
LONG = Kind("/stream 100 100\n/say and the end", "and the end")


@pytest.fixture
def load() -> Iterator[Load]:
    with at_work(environment=PATIENT) as load:
        yield load


def test_deploys_move_runs_to_other_workers(load: Load) -> None:
    stack = load.stack
    with load.going(14, seconds=10):
        long = load.start(LONG)
        owner = stack.wait_for(lambda: load.sql(OWNER, long), what="the owner of the long run")
        workers = sorted(("runs-1", "runs-2"), key=lambda name: owner != [(stack.processes[name].pid,)])
        for name in (*workers, "webhooks", "maintenance", "beat", "web", *workers):
            stack.restart(name)
    load.check(timeout=90)
    assert load.sql("SELECT max(lease_losses) FROM runs_run") == [(0,)]
    # More than one process executed the long run, and each of them released it at shutdown.
    assert load.sql("SELECT lease_token FROM runs_run WHERE id = %s", long)[0][0] > 1
