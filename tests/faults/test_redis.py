"""The broker emptied, gone and hanging under load: requests go on, and so do runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.load import PLAIN, QUICK, Load, at_work
from tests.stack.redis import RedisServer

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

# With limits on, for they live in Redis too; high enough to refuse nobody.
LIMITS = dict.fromkeys(("RATE_LIMIT_SESSION", "RATE_LIMIT_RUN_STARTS", "RATE_LIMIT_UNAUTHENTICATED"), "100000")
ANSWERED_WITHIN_SECONDS = 5.0


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """One for all tests here: each leaves it, and the service, as they were."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def load(redis_server: RedisServer) -> Iterator[Load]:
    with at_work(redis_url=redis_server.url(), environment=QUICK | LIMITS) as load:
        yield load


def test_emptied_again_and_again(load: Load, redis_server: RedisServer) -> None:
    with load.going(28, seconds=8):
        for _ in range(16):
            redis_server.flush()
            time.sleep(0.5)
    load.check()


def test_stopped_and_started_again(load: Load, redis_server: RedisServer) -> None:
    with load.going(28, seconds=10):
        time.sleep(2)
        redis_server.stop()
        # Nothing is accepted late because the broker is away, and the workers find the work themselves.
        during = load.start(PLAIN)
        assert load.driver.wait(during, timeout=30)["status"] == "completed"
        time.sleep(3)
        redis_server.start()
    assert load.slowest_start < ANSWERED_WITHIN_SECONDS
    load.check()


def test_hanging_with_its_connections_open(load: Load, redis_server: RedisServer) -> None:
    with load.going(28, seconds=10):
        time.sleep(2)
        redis_server.pause()
        try:
            during = load.start(PLAIN)
            assert load.driver.wait(during, timeout=30)["status"] == "completed"
            time.sleep(5)
        finally:
            redis_server.resume()
    assert load.slowest_start < ANSWERED_WITHIN_SECONDS
    load.check()
