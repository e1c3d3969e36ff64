"""Deploys one after the other under load: runs move over at once, and none counts as lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.load import QUICK, Kind, Load, at_work

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

# No lease runs out in this test: what waited for that would not end in time.
PATIENT = QUICK | {"RUN_LEASE_SECONDS": "300", "RUN_SHUTDOWN_GRACE_SECONDS": "1"}
LONG = Kind("/stream 120 100\n/say and the end", "and the end")


@pytest.fixture
def load() -> Iterator[Load]:
    with at_work(environment=PATIENT) as load:
        yield load


def test_deploys_move_runs_over(load: Load) -> None:
    with load.going(35, seconds=15):
        long = load.start(LONG)
        for _ in range(2):
            for name in ("runs-1", "runs-2", "webhooks", "maintenance", "beat", "web"):
                load.stack.restart(name)
    load.check(timeout=90)
    assert load.sql("SELECT max(lease_losses) FROM runs_run") == [(0,)]
    # The long run was carried by more than one process, and each of them gave it up by itself.
    assert load.sql("SELECT lease_token FROM runs_run WHERE id = %s", long)[0][0] > 1
