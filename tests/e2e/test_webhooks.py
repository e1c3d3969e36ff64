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
# Seconds, instead of half a minute to ten minutes, which webhooks/test_delivery.py tests.
WAITS = (2, 4, 3, 2)


def test_retries_arrive_when_due_and_never_earlier(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(environment={"webhooks.transitions.WAITS": str(WAITS)}, without=("maintenance", "beat"))
    driver = Driver(stack.session())
    arrived: list[float] = []

    def refuse(receiver, connection, request):
        if b'"agent.started"' in request.body:
            arrived.append(time.monotonic())
        answer(503)(receiver, connection, request)

    with receiving(refuse) as receiver:
        assert driver.http.post("/webhooks", {"url": receiver.url}).status_code == 200
        begun = time.monotonic()
        driver.finish("Hello")
        wait_for(lambda: len(arrived) == 1, SLACK_SECONDS, "the first attempt")  # it is not delayed
        assert arrived[0] >= begun
        for number, wait in enumerate(WAITS, start=2):
            wait_for(lambda number=number: len(arrived) == number, wait + SLACK_SECONDS, f"attempt {number}")
            assert arrived[-1] - arrived[-2] >= wait
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
