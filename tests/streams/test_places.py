"""Tests of the places of users: counted over processes in Redis, and per process while Redis is not available."""

import pytest
import redis

from config.kernel.errors import RateLimited
from config.limits import lease
from config.limits.lease import Lease
from config.redis import shared
from tests.driver import until

LIMIT = 3


def settle() -> None:
    """Wait until Redis knows what was freed and renewed."""
    lease.sender.submit(lambda: None).result(5)


@pytest.fixture
def use(settings):
    """Let the service use the Redis with this URL."""

    def use(url: str) -> None:
        settings.CACHE_REDIS_URL = url
        shared.cache_clear()

    url = settings.CACHE_REDIS_URL
    yield use
    settle()
    use(url)


@pytest.fixture
def make():
    """Make the places of a process."""
    made: list[Lease] = []

    def make(lease_seconds: float = 60) -> Lease:
        made.append(Lease("test", lease_seconds, "no"))
        return made[-1]

    yield make
    for one in made:
        for place in list(one.held):
            one.free(place)


def take_all(taker: Lease, user: int = 7) -> list[str]:
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
    settle()
    assert there.take(7, LIMIT)


def test_places_end_with_their_lease_unless_they_are_renewed(use, make, redis_server):
    use(redis_server.url())
    dead, alive, other = make(0.5), make(), make()
    dead.take(7, LIMIT)
    alive.take(7, LIMIT)
    with redis.Redis.from_url(redis_server.url()) as client:
        client.flushall()  # a restart without its data
    alive.renew()
    settle()
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
