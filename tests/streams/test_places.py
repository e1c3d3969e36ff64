"""Tests of the places of users: counted over processes in Redis, and per process while Redis is not available."""

from __future__ import annotations

import pytest
import redis

from config.api import ratelimit
from config.kernel.errors import RateLimited
from config.queue.publisher import publisher
from runs.streams import places
from runs.streams.places import Places
from tests.driver import until

LIMIT = 3


@pytest.fixture
def use(settings):
    """Let the service use the Redis with this URL."""

    def use(url: str) -> None:
        settings.CACHE_REDIS_URL = url
        places.connection.cache_clear()
        ratelimit.limiter_of.cache_clear()
        places.source.paused_until = 0.0

    url = settings.CACHE_REDIS_URL
    yield use
    publisher.flush(5)
    use(url)


@pytest.fixture
def make():
    """Make the places of a process."""
    made: list[Places] = []

    def make(lease_seconds: float = 60) -> Places:
        made.append(Places("test", lease_seconds, "no"))
        return made[-1]

    yield make
    for one in made:
        one.free_all()


def take_all(taker: Places, user: int = 7) -> list[str]:
    taken = [taker.take(user, LIMIT) for _ in range(LIMIT)]
    with pytest.raises(RateLimited) as refused:
        taker.take(user, LIMIT)
    assert int(refused.value.headers["Retry-After"]) >= 1
    return taken


def test_processes_share_the_places_of_a_user(use, make, redis_server):
    use(redis_server.url())
    here, there = make(), make()
    taken = take_all(here)
    with pytest.raises(RateLimited):
        there.take(7, LIMIT)
    take_all(there, user=8)
    here.free(taken[0])
    publisher.flush(5)
    assert there.take(7, LIMIT)


def test_places_end_with_their_lease_unless_they_are_renewed(use, make, redis_server):
    use(redis_server.url())
    dead, alive, other = make(0.5), make(), make()
    dead.take(7, LIMIT)
    alive.take(7, LIMIT)
    with redis.Redis.from_url(redis_server.url()) as client:
        client.flushall()  # a restart without its data
    alive.renew()
    publisher.flush(5)
    dead.take(7, LIMIT)
    other.take(7, LIMIT)
    with pytest.raises(RateLimited):
        other.take(7, LIMIT)

    def free() -> bool:
        try:
            return bool(other.take(7, LIMIT))
        except RateLimited:
            return False

    until(free, 10)
    with pytest.raises(RateLimited):
        other.take(7, LIMIT)


def test_without_redis_the_limit_holds_per_process(use, make):
    use("unix:///nowhere/redis.sock")
    here = make()
    taken = take_all(here)
    take_all(make())
    here.renew()
    here.free(taken[0])
    here.free(taken[0])
    assert here.take(7, LIMIT)
    with pytest.raises(RateLimited):
        here.take(7, LIMIT)
