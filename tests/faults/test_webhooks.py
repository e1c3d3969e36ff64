"""Deliveries while their worker is killed and the broker is flushed, repeatedly, and receivers fail."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from zlib import crc32

import pytest

from tests.driver import Driver
from tests.faults.load import QUICK
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack
from tests.webhooks import receiver as behaviours
from tests.webhooks.receiver import Receiver, answer, receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

USERS, RUNS, CALLS = 5, 10, 8
DELIVERIES = USERS * RUNS * (CALLS + 2)
KILLS_EARLY, KILLS_LATE = 3, 2
SCRIPT = "\n".join(['/call calculate {"expression": "6*7"}'] * CALLS + ["/say done"])
FIRST_WAIT_SECONDS = 30
# How many seconds the test removes from the first wait. tests/e2e/test_webhooks.py checks the real waits.
SKIPPED_SECONDS = 24
SKIP = """
from datetime import timedelta
from django.db.models import F
from webhooks.models import Delivery
waiting = Delivery.objects.filter(status="PENDING", claim_id=None, attempt_count=1)
waiting.update(next_attempt_at=F("next_attempt_at") - timedelta(seconds={seconds}))
"""


class Arrivals:
    """Records the arrivals: (event, attempt number, seconds)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def behave(self, receiver: Receiver, connection: Any, request: behaviours.Received) -> None:
        """Most first attempts fail in different ways. Later attempts succeed after a short delay."""
        event, number = (
            str(request.header("X-Service-Event-Id")),
            int(request.header("X-Service-Delivery-Attempt") or 0),
        )
        self.seen.append((event, number, time.monotonic()))
        luck = crc32(event.encode()) % 10
        if number > 1 or luck < 3:
            time.sleep(0.1)  # so that a kill interrupts some attempts
            answer(204, b"")(receiver, connection, request)
        elif luck < 7:
            answer(500)(receiver, connection, request)
        elif luck < 9:
            behaviours.close(receiver, connection, request)
        else:
            behaviours.drip_body(receiver, connection, request)


def test_killed_workers_and_a_flushed_broker_lose_no_delivery(
    redis_server: RedisServer, make_stack: Callable[..., Stack]
) -> None:
    stack = make_stack(redis_url=redis_server.url(), environment=QUICK)
    arrivals = Arrivals()
    with ThreadPoolExecutor(USERS) as pool:
        drivers = list(pool.map(lambda number: Driver(stack.session(f"user{number}")), range(USERS)))

    def deliveries(status: str = "") -> list[dict[str, Any]]:
        found = []
        for driver in drivers:
            cursor: str | None = ""
            while cursor is not None:
                query = "?limit=100" + (f"&status={status}" if status else "") + (f"&cursor={cursor}" if cursor else "")
                page = driver.http.get(f"/webhooks/deliveries{query}").json()
                found += page["items"]
                cursor = page["nextCursor"]
        return found

    def break_things(times: int) -> None:
        for _ in range(times):
            time.sleep(1)
            redis_server.flush()
            stack.kill("webhooks")
            redis_server.flush()
            stack.restart("webhooks")

    with contextlib.ExitStack() as receivers:
        for driver in drivers:
            receiver = receivers.enter_context(receiving(arrivals.behave))
            assert driver.http.post("/webhooks", {"url": receiver.url}).status_code == 200
        runs = [(driver, driver.start(SCRIPT)["id"]) for driver in drivers for _ in range(RUNS)]
        break_things(KILLS_EARLY)
        for driver, run in runs:
            assert driver.wait(run, timeout=60)["status"] == "completed"
        stack.wait_for(
            lambda: all(delivery["attempts"] for delivery in deliveries("PENDING")), 60, "the end of all first attempts"
        )
        stack.manage("shell", "--no-imports", "-c", SKIP.format(seconds=SKIPPED_SECONDS))
        stack.wait_for(lambda: len(deliveries("DELIVERED")) > DELIVERIES // 2, 90, "retries that succeed")
        break_things(KILLS_LATE)
        stack.wait_for(lambda: not deliveries("PENDING"), 90, "the end of all deliveries")
        ended = deliveries()

    assert len(ended) == len({delivery["eventId"] for delivery in ended}) == DELIVERIES
    assert {delivery["status"] for delivery in ended} == {"DELIVERED"}
    made = Counter((event, number) for event, number, _ in arrivals.seen)
    last = {(event, number): at for event, number, at in arrivals.seen}
    repeated = 0
    for delivery in ended:
        for attempt in delivery["attempts"]:
            key = (delivery["eventId"], attempt["number"])
            assert made[key] >= 1, "an attempt was recorded that nobody saw"
            # A number arrives twice only if a worker was killed during that attempt.
            assert made[key] <= 1 + KILLS_EARLY + KILLS_LATE
            repeated += made[key] > 1
        if len(delivery["attempts"]) > 1:
            assert last[delivery["eventId"], 2] - last[delivery["eventId"], 1] >= FIRST_WAIT_SECONDS - SKIPPED_SECONDS
    assert sum(len(delivery["attempts"]) > 1 for delivery in ended) > DELIVERIES // 2
    # A worker has at most 4 concurrent attempts to each endpoint when it is killed.
    assert repeated <= (KILLS_EARLY + KILLS_LATE) * USERS * 4
    stack.manage("check_invariants")
