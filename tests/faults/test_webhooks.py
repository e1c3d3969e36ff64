"""Deliveries while their worker is killed and the broker is flushed, repeatedly, and receivers fail."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty
from typing import Any
from zlib import crc32

import psycopg
import pytest

from tests.driver import Driver
from tests.faults.load import QUICK, require_correct_data
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack
from tests.webhooks import receiver as behaviours
from tests.webhooks.receiver import Receiver, answer, receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

# A claim lapses after both together.
SHORT = QUICK | {
    "config.settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS": "1.5",
    "webhooks.transitions.WEBHOOK_CLAIM_MARGIN_SECONDS": "1",
}
USERS, RUNS, CALLS = 4, 3, 8
DELIVERIES = USERS * RUNS * (CALLS + 2)
KILLS_EARLY, KILLS_LATE = 2, 1
SCRIPT = "\n".join(['/call calculate {"expression": "6*7"}'] * CALLS + ["/say done"])
FIRST_WAIT_SECONDS = 30
# How many seconds the test removes from the first wait. tests/e2e/test_webhooks.py checks the real waits.
SKIPPED_SECONDS = 24
SKIP = """
    UPDATE webhooks_delivery SET next_attempt_at = next_attempt_at - %s * interval '1 second'
    WHERE status = 'PENDING' AND claim_id IS NULL AND attempt_count = %s
"""
END_WAITS = "UPDATE webhooks_delivery SET next_attempt_at = now() WHERE status = 'PENDING' AND claim_id IS NULL"

PENDING = "SELECT 1 FROM webhooks_delivery WHERE status = 'PENDING' LIMIT 1"
UNTRIED = """
    SELECT 1 FROM webhooks_delivery WHERE status = 'PENDING'
    AND NOT EXISTS (SELECT FROM webhooks_attempt WHERE delivery_id = webhooks_delivery.id) LIMIT 1
"""
DELIVERED = "SELECT count(*) FROM webhooks_delivery WHERE status = 'DELIVERED'"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def stack(redis_server: RedisServer) -> Iterator[Stack]:
    """What all tests of this file share. Each has users of its own, and leaves no pending delivery."""
    with Stack(**given_services() | {"redis_url": redis_server.url()}, environment=SHORT) as running:
        yield running


def execute(stack: Stack, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True) as connection:
        cursor = connection.execute(statement, parameters)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


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


def test_killed_workers_and_a_flushed_broker_lose_no_delivery(redis_server: RedisServer, stack: Stack) -> None:
    arrivals = Arrivals()
    with ThreadPoolExecutor(USERS) as pool:
        drivers = list(pool.map(lambda number: Driver(stack.session(f"user{number}")), range(USERS)))

    def deliveries() -> list[dict[str, Any]]:
        found = []
        for driver in drivers:
            cursor: str | None = ""
            while cursor is not None:
                query = "?limit=100" + (f"&cursor={cursor}" if cursor else "")
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
        stack.wait_for(lambda: not execute(stack, UNTRIED), 60, "the end of all first attempts")
        execute(stack, SKIP, SKIPPED_SECONDS, 1)
        stack.wait_for(lambda: execute(stack, DELIVERED)[0][0] > DELIVERIES // 2, 90, "retries that succeed")
        break_things(KILLS_LATE)

        def all_ended() -> bool:
            execute(stack, SKIP, 90, 2)  # the waits after attempts whose worker was killed
            return not execute(stack, PENDING)

        stack.wait_for(all_ended, 90, "the end of all deliveries")
        ended = deliveries()

    assert len(ended) == len({delivery["eventId"] for delivery in ended}) == DELIVERIES
    assert {delivery["status"] for delivery in ended} == {"DELIVERED"}
    made = Counter((event, number) for event, number, _ in arrivals.seen)
    last = {(event, number): at for event, number, at in arrivals.seen}
    lost = 0
    for delivery in ended:
        for attempt in delivery["attempts"]:
            key = (delivery["eventId"], attempt["number"])
            if attempt["error"] == "The outcome is not known.":
                lost += 1  # the worker was killed before or after it sent the attempt
                assert made[key] <= 1
            else:
                assert made[key] == 1, "an attempt was recorded that nobody saw, or was sent twice"
        assert max(number for event, number in made if event == delivery["eventId"]) <= 5
        first, second = (last.get((delivery["eventId"], number)) for number in (1, 2))
        if first and second:
            assert second - first >= FIRST_WAIT_SECONDS - SKIPPED_SECONDS
    assert sum(len(delivery["attempts"]) > 1 for delivery in ended) > DELIVERIES // 2
    # A worker has at most 4 concurrent attempts to each endpoint when it is killed.
    assert lost <= (KILLS_EARLY + KILLS_LATE) * USERS * 4
    require_correct_data(stack)


STATES = """
    SELECT status, count(*), max(attempt_count) FROM webhooks_delivery
    WHERE user_id = (SELECT id FROM auth_user WHERE username = 'eve') GROUP BY status
"""


def test_five_attempts_are_sent_at_most_if_the_worker_always_dies_before_it_records(stack: Stack) -> None:
    """The receiver never answers, and the worker is killed during every attempt, until the deliveries are dead."""
    driver = Driver(stack.session("eve"))
    with receiving(behaviours.hang) as receiver:
        assert driver.http.post("/webhooks", {"url": receiver.url}).status_code == 200
        driver.finish("Hello")
        for _ in range(8):
            with contextlib.suppress(Empty):
                receiver.arrivals.get(timeout=20)
            stack.kill("webhooks")
            while not receiver.arrivals.empty():
                receiver.arrivals.get()
            stack.restart("webhooks")
            # The claims lapse, and the sweep finds them.
            stack.wait_for(lambda: not execute(stack, CLAIMED), 20, "the end of the lost attempts")
            if {row[0] for row in execute(stack, STATES)} == {"DEAD"}:
                break
            execute(stack, END_WAITS)
        sent = Counter(str(request.header("X-Service-Event-Id")) for request in receiver.requests)
    # A worker can die before it sends the second of two claims, so one delivery may have been sent less often.
    assert max(sent.values()) == 5
    assert execute(stack, STATES) == [("DEAD", 2, 5)]
    require_correct_data(stack)


CLAIMED = "SELECT 1 FROM webhooks_delivery WHERE status = 'PENDING' AND claim_id IS NOT NULL"
# The database refuses the record of an attempt that was answered with 418.
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF new.status_code = 418 THEN RAISE EXCEPTION 'refused'; END IF; RETURN new; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON webhooks_attempt FOR EACH ROW EXECUTE FUNCTION refuse();
"""


def test_outcome_that_the_database_refuses_harms_no_other(stack: Stack) -> None:
    with psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(REFUSE)
    driver, other = (Driver(stack.session(name)) for name in ("ada", "ben"))
    with receiving(answer(418)) as bad, receiving(answer(204, b"")) as good:
        assert driver.http.post("/webhooks", {"url": bad.url}).status_code == 200
        assert other.http.post("/webhooks", {"url": good.url}).status_code == 200
        for one in [driver, other] * 2 + [other] * 8:
            one.start("Hello")
        stack.wait_for(lambda: execute(stack, STATES_OF, "ben") == [("DELIVERED", 20)], 60, "the good deliveries")

        def dead() -> bool:
            execute(stack, END_WAITS)
            return execute(stack, STATES_OF, "ada") == [("DEAD", 4)]

        stack.wait_for(dead, 90, "the end of the refused deliveries")
        assert set(Counter(str(request.header("X-Service-Event-Id")) for request in bad.requests).values()) == {5}
        assert len(good.requests) == 20
    require_correct_data(stack)


STATES_OF = """
    SELECT status, count(*) FROM webhooks_delivery WHERE user_id = (SELECT id FROM auth_user WHERE username = %s)
    GROUP BY status
"""
