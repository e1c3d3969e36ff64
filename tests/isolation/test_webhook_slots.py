"""Webhook slots: deliveries to a receiver that hangs do not delay the deliveries of other users."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.driver import Driver, until
from tests.isolation.compare import assert_isolated
from tests.streams.conftest import StreamStack
from tests.webhooks.receiver import answer, held, receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

# Each run has two deliveries. Together they are more than the slots of the webhook worker.
RUNS = 20
# WEBHOOK_ENDPOINT_CONCURRENCY
SLOTS = 4


def test_a_receiver_that_hangs_does_not_delay_other_users(stack: StreamStack) -> None:
    greedy, modest = Driver(stack.session("greedy-hooks")), Driver(stack.session("modest-hooks"))

    with receiving() as slow, receiving() as quick:
        for driver, receiver in ((greedy, slow), (modest, quick)):
            assert driver.http.post("/webhooks", {"url": receiver.url}).status_code == 200

        def act() -> None:
            run = modest.start("Hello")["id"]
            while True:
                told = json.loads(quick.arrivals.get(timeout=30).body)
                if (told["runId"], told["type"]) == (run, "agent.completed"):
                    return

        @contextlib.contextmanager
        def hanging() -> Iterator[None]:
            release = threading.Event()
            slow.behaviours = [held(release)]
            with ThreadPoolExecutor(8) as pool:
                runs = [run["id"] for run in pool.map(greedy.start, ["Hello"] * RUNS)]
            for run in runs:
                greedy.wait(run)
            until(lambda: slow.under_way == SLOTS)
            yield
            assert slow.under_way == SLOTS, "the receiver did not hang"
            slow.behaviours = [answer()]
            release.set()
            until(lambda: not greedy.http.get("/webhooks/deliveries?status=PENDING").json()["items"])

        assert_isolated(act, hanging)
