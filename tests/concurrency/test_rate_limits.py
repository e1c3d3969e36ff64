"""Tests of the rate limits with several web processes and concurrent requests."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.stack.redis import RedisServer
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

LIMIT, REQUESTS = 30, 60


def test_concurrent_requests_are_limited(redis_server: RedisServer, make_stack: Callable[..., Stack]) -> None:
    limits = dict.fromkeys(("RATE_LIMIT_SESSION", "RATE_LIMIT_PUBLIC", "RATE_LIMIT_UNAUTHENTICATED"), str(LIMIT))
    settings = {"WEB_WORKERS": "2", **limits}
    stack = make_stack(redis_url=redis_server.url(), environment=settings, without=("beat", "webhooks", "maintenance"))
    callers = {"user": stack.session("ada"), "nobody": stack.session("bob")}
    callers["nobody"].credential = "of nobody"
    addresses = itertools.count()

    def ask(caller: str) -> requests.Response:
        # Each request claims another address. The service must ignore it, because it trusts no proxy.
        forged = f"10.0.0.{next(addresses) % 250}"
        return callers[caller].get("/me", headers={"X-Forwarded-For": forged, "Forwarded": f"for={forged}"})

    for caller, taken in (("user", 200), ("nobody", 401)):
        begun = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _, caller=caller: ask(caller), range(REQUESTS)))
        # The limit refills during the requests.
        returned = (time.monotonic() - begun) * LIMIT / 60
        allowed = [answer for answer in answers if answer.status_code == taken]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(allowed) + len(refused) == REQUESTS
        assert LIMIT <= len(allowed) <= LIMIT + returned + 1
        for answer in answers:
            assert answer.headers["X-RateLimit-Limit"] == str(LIMIT)
            assert 0 <= int(answer.headers["X-RateLimit-Remaining"]) < LIMIT
            assert int(answer.headers["X-RateLimit-Reset"]) >= 1
        for answer in refused:
            assert answer.json()["error"]["code"] == "RATE_LIMITED"
            assert int(answer.headers["Retry-After"]) >= 1

    # Without Redis no request is refused.
    redis_server.stop()
    assert {ask("user").status_code for _ in range(5)} == {200}
