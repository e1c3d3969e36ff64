"""One user's slow tools and files at their limits, and another user beside on the same worker, who stays as fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Driver
from tests.faults.load import QUICK
from tests.stack.plugin import given_services
from tests.stack.stack import Stack
from tests.webhooks.receiver import Receiver, answer, hang, receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

CATALOGUE = """
from runs.models import Tool
for name, url in (("stuck", "{stuck}"), ("quick", "{quick}")):
    Tool.objects.create(
        name=name, display_name=name, description=name, node_type="http", price=0, approval="never", repeatable=True,
        url=url, timeout_seconds=60, input_schema={{"type": "object", "properties": {{}}}},
    )
"""
CALLS_AT_WORK = 32
SAMPLES = 25
# On a loaded machine, a difference below this is no sign of a queue.
FLOOR_SECONDS = 0.5
# Of a worker: Celery's, the database's, CPU and files, loops, heartbeat and publisher. Calls at work need none.
THREADS_MAX = 60


class Users:
    """A greedy and a modest user of a stack with one run worker."""

    def __init__(self, stack: Stack, stuck: Receiver) -> None:
        self.stack, self.stuck = stack, stuck
        self.greedy = Driver(stack.session("greedy"))
        self.modest = Driver(stack.session("modest"))

    def slowest(self, script: str) -> float:
        """The p99 of so few samples is their maximum. In seconds, of a whole run of the modest user."""
        seconds = []
        for _ in range(SAMPLES):
            begun = time.monotonic()
            run = self.modest.wait(self.modest.start(script)["id"])
            seconds.append(time.monotonic() - begun)
            assert run["status"] == "completed", run
            assert all(call["status"] == "COMPLETED" for call in run["toolInvocations"]), run
        return max(seconds)

    def threads(self) -> int:
        status = Path(f"/proc/{self.stack.processes['runs-1'].pid}/status").read_text()
        return int(status.partition("Threads:")[2].split()[0])


@pytest.fixture(scope="module")
def users() -> Iterator[Users]:
    with receiving(hang) as stuck, receiving(answer(200, b'{"result": "ok"}')) as quick:
        catalogue = CATALOGUE.format(stuck=stuck.url, quick=quick.url)
        with Stack(**given_services(), run_workers=1, environment=QUICK, prepare=catalogue) as stack:
            yield Users(stack, stuck)


def test_calls_to_a_stuck_endpoint_do_not_delay_another_users_calls(users: Users) -> None:
    script = '/call quick {}\n/call calculate {"expression": "6*7"}\n/say done'
    users.slowest(script)
    alone = users.slowest(script)
    stuck = [users.greedy.start("\n".join(["/call stuck {}"] * 64))["id"] for _ in range(2)]
    users.stack.wait_for(lambda: users.stuck.under_way >= CALLS_AT_WORK, what="the greedy user's calls")
    assert users.slowest(script) <= alone * 2 + FLOOR_SECONDS
    assert users.threads() <= THREADS_MAX
    assert users.stuck.most_under_way == CALLS_AT_WORK
    for run_id in stuck:
        users.greedy.cancel(run_id)
    for run_id in stuck:
        assert users.greedy.wait(run_id, timeout=20)["status"] == "cancelled"
    users.stack.manage("check_invariants")
