"""A provider's limits with two real workers, in Redis and in the database."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from tests.driver import Driver
from tests.faults.load import QUICK
from tests.faults.providers import CountingProvider, counting, rows
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

LEASE_SECONDS = 4
ENVIRONMENT = QUICK | {"RUN_USER_LIMIT": "0", "runs.llm.limits.MODEL_PLACES_LEASE_SECONDS": str(LEASE_SECONDS)}


class Service:
    """A stack whose default model is the counting provider's."""

    def __init__(self, stack: Stack, provider: CountingProvider) -> None:
        self.stack, self.provider = stack, provider

    def driver(self, user: str) -> Driver:
        return Driver(self.stack.session(user))

    def complete(self, driver: Driver, runs: list[str]) -> None:
        for run_id in runs:
            run = driver.wait(run_id, timeout=90)
            assert run["status"] == "completed", run

    def running(self, driver: Driver, number: int) -> None:
        """Wait until that many of the user's runs are running."""
        limit = "/runs?status=running&limit=100"
        self.stack.wait_for(lambda: len(driver.http.get(limit).json()["items"]) == number, what="the running runs")


@pytest.fixture(params=["redis", "database"])
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Service]]:
    with ExitStack() as running:

        def start(seconds: float = 0.0, options: dict[str, Any] | None = None, **limits: int) -> Service:
            provider = running.enter_context(counting(seconds))
            given = given_services() | ({"redis_url": None} if request.param == "database" else {}) | (options or {})
            prepare = rows(provider, default=True, **limits)
            stack = Stack(**given, run_workers=2, environment=ENVIRONMENT, prepare=prepare)
            return Service(running.enter_context(stack), provider)

        yield start


def test_requests_at_the_same_time_are_limited(serve):
    service = serve(0.1, max_concurrent=3)
    service.provider.close_gate()
    ada = service.driver("ada")
    runs = [ada.start("Hello")["id"] for _ in range(40)]
    service.running(ada, 40)
    with psycopg.connect(service.stack.environment["DATABASE_URL"]) as connection:
        assert len(connection.execute("SELECT DISTINCT worker_id FROM runs_run").fetchall()) == 2
    service.provider.open_gate()
    service.complete(ada, runs)
    assert service.provider.most_at_work == 3
    assert len(service.provider.begun) == 40


def test_the_rate_holds_over_all_workers(serve):
    service = serve(requests_per_minute=12)
    ada = service.driver("ada")
    runs = [ada.start("Hello")["id"] for _ in range(30)]
    service.running(ada, 18)
    time.sleep(5)
    assert len(service.provider.begun) == 12
    for run_id in runs:
        ada.cancel(run_id)
    ended = [ada.wait(run_id)["status"] for run_id in runs]
    assert (ended.count("completed"), ended.count("cancelled")) == (12, 18)


def test_a_greedy_user_delays_another_by_one_place(serve):
    service = serve(0.05, max_concurrent=1)
    greedy, modest = service.driver("greedy"), service.driver("modest")
    service.provider.close_gate()
    runs = [greedy.start("greedy")["id"] for _ in range(40)]
    service.running(greedy, 40)
    run = modest.start("modest")
    service.running(modest, 1)
    time.sleep(1)  # the worker has said that the run waits
    service.provider.open_gate()
    service.complete(modest, [run["id"]])
    assert service.provider.messages.index("modest") <= 2
    service.complete(greedy, runs)
    assert service.provider.most_at_work == 1


def test_the_places_of_a_killed_worker_are_free_after_the_lease(serve):
    service = serve(max_concurrent=2)
    ada = service.driver("ada")
    service.stack.kill("runs-2")
    service.provider.close_gate()
    runs = [ada.start("Hello")["id"] for _ in range(6)]
    service.stack.wait_for(lambda: service.provider.at_work == 2, what="two requests")
    service.stack.kill("runs-1")
    service.stack.processes["runs-2"].start()
    killed = time.monotonic()
    service.stack.wait_for(lambda: len(service.provider.begun) == 4, what="two requests of the other worker")
    # The runs are taken over after their own lease, and the worker needs time to start.
    assert time.monotonic() - killed < LEASE_SECONDS + 20
    service.provider.open_gate()
    service.complete(ada, runs)
    assert service.provider.most_at_work == 2


def test_limits_hold_during_an_outage_of_redis():
    with counting(0.1) as provider, RedisServer() as redis:
        given = given_services() | {"redis_url": redis.url()}
        prepare = rows(provider, default=True, max_concurrent=2)
        with Stack(**given, run_workers=2, environment=ENVIRONMENT, prepare=prepare) as stack:
            service = Service(stack, provider)
            ada = service.driver("ada")
            runs = [ada.start("Hello")["id"] for _ in range(20)]
            stack.wait_for(lambda: len(provider.begun) >= 5, what="the first requests")
            redis.stop()
            runs += [ada.start("Hello")["id"] for _ in range(20)]
            stack.wait_for(lambda: len(provider.begun) >= 25, what="requests during the outage")
            redis.start()
            service.complete(ada, runs)
            assert provider.most_at_work == 2
            assert len(provider.begun) == len(runs)
