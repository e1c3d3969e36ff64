"""Webhook retries in real time, by real workers."""

import time
from collections.abc import Callable

import pytest

from tests.driver import Driver
from tests.stack.process import wait_for
from tests.stack.stack import Stack
from tests.webhooks.receiver import answer, receiving

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(180)]

# How many seconds after its due time an attempt may arrive on a busy machine.
SLACK_SECONDS = 25
SHIFT = """
from datetime import timedelta
from django.db.models import F
from webhooks.models import Delivery
rows = Delivery.objects.filter(run_id="{run}", event_type="agent.started")
rows.update(next_attempt_at=F("next_attempt_at") - timedelta(seconds={seconds}))
"""


def test_retries_arrive_when_due_and_never_earlier(make_stack: Callable[..., Stack]) -> None:
    """The first attempt is not delayed. Of each wait before another, the test keeps the last seconds."""
    stack = make_stack()
    driver = Driver(stack.session())
    arrived: list[float] = []

    def refuse(receiver, connection, request):
        if b'"agent.started"' in request.body:
            arrived.append(time.monotonic())
        answer(503)(receiver, connection, request)

    with receiving(refuse) as receiver:
        assert driver.http.post("/webhooks", {"url": receiver.url}).status_code == 200
        begun = time.monotonic()
        run = driver.finish("Hello")
        wait_for(lambda: len(arrived) == 1, SLACK_SECONDS, "the first attempt")
        assert arrived[0] >= begun
        for number, wait, left in ((2, 30, 4), (3, 90, 4), (4, 270, 3), (5, 600, 2)):
            # The next attempt gets its due time only when this one is recorded.
            wait_for(lambda number=number: attempts(driver) == number - 1, SLACK_SECONDS, "the attempt's record")
            stack.manage("shell", "--no-imports", "-c", SHIFT.format(run=run["id"], seconds=wait - left))
            wait_for(lambda number=number: len(arrived) == number, left + SLACK_SECONDS, f"attempt {number}")
            assert arrived[-1] - arrived[-2] >= left
        wait_for(lambda: started(driver)["status"] == "DEAD", SLACK_SECONDS, "the delivery's death")
        numbers = [
            request.header("X-Service-Delivery-Attempt")
            for request in receiver.requests
            if b'"agent.started"' in request.body
        ]
        assert numbers == ["1", "2", "3", "4", "5"]


def started(driver: Driver) -> dict:
    items = driver.http.get("/webhooks/deliveries").json()["items"]
    return next(item for item in items if item["eventType"] == "agent.started")


def attempts(driver: Driver) -> int:
    return len(started(driver)["attempts"])
