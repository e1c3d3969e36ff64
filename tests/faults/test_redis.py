"""The broker is flushed, stopped or paused under load: requests and runs continue."""

import time
from collections.abc import Iterator

import pytest

from tests.faults.load import PLAIN, QUICK, Load, at_work
from tests.stack.redis import RedisServer

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

# Rate limits are on, because Redis holds them too. They are high enough to reject no request.
LIMITS = dict.fromkeys(("RATE_LIMIT_SESSION", "RATE_LIMIT_RUN_STARTS", "RATE_LIMIT_UNAUTHENTICATED"), "100000")
ANSWERED_WITHIN_SECONDS = 5.0


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests of this file. Each test restores it and the service."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def load(redis_server: RedisServer) -> Iterator[Load]:
    with at_work(redis_url=redis_server.url(), environment=QUICK | LIMITS) as load:
        yield load


def test_runs_continue_while_redis_is_flushed_and_stopped(load: Load, redis_server: RedisServer) -> None:
    with load.going(21, seconds=8):
        for _ in range(8):
            redis_server.flush()
            time.sleep(0.5)
        redis_server.stop()
        # Without the broker, requests are accepted without delay and the sweeps of the workers find the runs.
        during = load.start(PLAIN)
        assert load.driver.wait(during, timeout=30)["status"] == "completed"
        time.sleep(2)
        redis_server.start()
    assert load.slowest_start < ANSWERED_WITHIN_SECONDS
    load.check()


def test_runs_continue_while_redis_hangs_with_open_connections(load: Load, redis_server: RedisServer) -> None:
    with load.going(14, seconds=7):
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
