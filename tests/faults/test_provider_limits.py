"""A provider's limits with two real workers, in Redis and in the database."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest

from tests.driver import Driver
from tests.faults.load import QUICK, RUNS_ALONE
from tests.faults.providers import CountingProvider, counting, rows
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

LEASE_SECONDS = 4
ENVIRONMENT = QUICK | {"RUN_USER_LIMIT": "0", "runs.llm.limits.MODEL_PLACES_LEASE_SECONDS": str(LEASE_SECONDS)}


# The providers and models of the tests, which share a stack: their limits, and how long an answer takes.
PROVIDERS: dict[str, tuple[float, dict[str, int]]] = {
    "three": (0.1, {"max_concurrent": 3}),
    "twelve-a-minute": (0.0, {"requests_per_minute": 12}),
    "one": (0.05, {"max_concurrent": 1}),
    "two": (0.0, {"max_concurrent": 2}),
}


class Service:
    """A stack with a model of the counting provider."""

    def __init__(self, stack: Stack, provider: CountingProvider, model: str) -> None:
        self.stack, self.provider, self.model = stack, provider, model

    def driver(self, user: str) -> Driver:
        return Driver(self.stack.session(f"{user}-{self.model}"))

    def start(self, driver: Driver, number: int, message: str = "Hello") -> list[str]:
        return [driver.start(message, model=self.model)["id"] for _ in range(number)]

    def complete(self, driver: Driver, runs: list[str]) -> None:
        for run_id in runs:
            run = driver.wait(run_id, timeout=90)
            assert run["status"] == "completed", run

    def running(self, driver: Driver, number: int) -> None:
        """Wait until that many of the user's runs are running."""
        limit = "/runs?status=running&limit=100"
        self.stack.wait_for(lambda: len(driver.http.get(limit).json()["items"]) == number, what="the running runs")


@pytest.fixture(scope="module", params=["redis", "database"])
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Service]]:
    with ExitStack() as running:
        providers = {name: running.enter_context(counting(seconds)) for name, (seconds, _) in PROVIDERS.items()}
        prepare = "".join(rows(provider, name=name, **PROVIDERS[name][1]) for name, provider in providers.items())
        given = given_services() | ({"redis_url": None} if request.param == "database" else {})
        stack = running.enter_context(
            Stack(**given, run_workers=2, without=RUNS_ALONE, environment=ENVIRONMENT, prepare=prepare)
        )
        yield lambda name: Service(stack, providers[name], name)


def test_requests_at_the_same_time_are_limited(serve):
    service = serve("three")
    service.provider.close_gate()
    ada = service.driver("ada")
    runs = service.start(ada, 10)
    service.running(ada, 10)
    with psycopg.connect(service.stack.environment["DATABASE_URL"]) as connection:
        workers = connection.execute("SELECT DISTINCT worker_id FROM runs_run WHERE status = 'running'").fetchall()
        assert len(workers) == 2
    service.provider.open_gate()
    service.complete(ada, runs)
    assert service.provider.most_at_work == 3
    assert len(service.provider.begun) == 10


def test_the_rate_holds_over_all_workers(serve):
    service = serve("twelve-a-minute")
    ada = service.driver("ada")
    runs = service.start(ada, 22)
    service.running(ada, 10)
    time.sleep(3)
    assert len(service.provider.begun) == 12
    for run_id in runs:
        ada.cancel(run_id)
    ended = [ada.wait(run_id)["status"] for run_id in runs]
    assert (ended.count("completed"), ended.count("cancelled")) == (12, 10)


def test_a_greedy_user_delays_another_by_one_place(serve):
    service = serve("one")
    greedy, modest = service.driver("greedy"), service.driver("modest")
    service.provider.close_gate()
    runs = service.start(greedy, 10, "greedy")
    service.running(greedy, 10)
    run = service.start(modest, 1, "modest")
    service.running(modest, 1)
    time.sleep(1)  # the worker has said that the run waits
    service.provider.open_gate()
    service.complete(modest, run)
    assert service.provider.messages.index("modest") <= 2
    service.complete(greedy, runs)
    assert service.provider.most_at_work == 1


def test_the_places_of_a_killed_worker_are_free_after_the_lease(serve):
    service = serve("two")
    ada = service.driver("ada")
    service.stack.kill("runs-2")
    service.provider.close_gate()
    runs = service.start(ada, 6)
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
    service.stack.restart("runs-1")


def test_limits_hold_during_an_outage_of_redis():
    with counting(0.1) as provider, RedisServer() as redis:
        given = given_services() | {"redis_url": redis.url()}
        prepare = rows(provider, default=True, max_concurrent=2)
        with Stack(**given, run_workers=2, without=RUNS_ALONE, environment=ENVIRONMENT, prepare=prepare) as stack:
            service = Service(stack, provider, "counted")
            ada = service.driver("ada")
            runs = service.start(ada, 10)
            stack.wait_for(lambda: len(provider.begun) >= 3, what="the first requests")
            redis.stop()
            runs += service.start(ada, 10)
            stack.wait_for(lambda: len(provider.begun) >= 13, what="requests during the outage")
            redis.start()
            service.complete(ada, runs)
            assert provider.most_at_work == 2
            assert len(provider.begun) == len(runs)
