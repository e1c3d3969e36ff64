"""One user disables an endpoint with very many pending deliveries. The runs of another user go on."""

import threading
import time
from collections.abc import Callable

import psycopg
import pytest

from tests.driver import Driver
from tests.faults.load import require_correct_data
from tests.stack.stack import Stack
from tests.webhooks.receiver import receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(400)]

PENDING = 100_000
RUNS = 12
# On a busy machine a run, or a request, may take this long without a greedy user.
FLOOR_SECONDS = 2.0
FILL = """
    INSERT INTO webhooks_delivery (id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, body,
        status, attempt_count, next_attempt_at, created_at)
    SELECT 'dlv_' || n, 'evt_' || n, endpoint.id, endpoint.user_id, 'agent.started', 'run_' || n, 'chat', '{}',
        'PENDING', 1, now() + interval '1 hour', now()
    FROM webhooks_endpoint endpoint, generate_series(1, %s) n
"""
SCRIPT = "\n".join(['/call calculate {"expression": "6*7"}'] * 5 + ["/say done"])


def test_disabling_an_endpoint_with_many_deliveries_delays_nobody(make_stack: Callable[..., Stack]) -> None:
    # The deliveries wait for their second attempt; the limit is higher, so that all are there when they are dropped.
    stack = make_stack(environment={"webhooks.transitions.WEBHOOK_PENDING_MAX": "1000000", "SIGNUP_CREDITS": "100000"})
    greedy, modest = (Driver(stack.session(name)) for name in ("greedy", "modest"))
    with receiving() as receiver, psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True) as database:
        assert greedy.http.post("/webhooks", {"url": receiver.url}).status_code == 200
        database.execute(FILL, (PENDING,))
        if database.execute("SELECT 1 FROM information_schema.columns WHERE column_name = 'drop_until'").fetchone():
            database.execute("UPDATE webhooks_delivery SET ready = false")
        alone = [seconds_of_a_run(modest) for _ in range(RUNS)]

        done = threading.Event()
        disabling: list[float] = []

        def disable() -> None:
            begun = time.monotonic()
            assert greedy.http.patch("/webhooks", {"enabled": False}, timeout=120).status_code == 200
            disabling.append(time.monotonic() - begun)
            done.set()

        started: list[str] = []

        def start_runs() -> None:
            while not done.is_set() or len(started) < 20:
                started.append(greedy.start(SCRIPT)["id"])

        # Runs of the greedy user record events for the endpoint meanwhile.
        threads = [threading.Thread(target=work) for work in (start_runs, disable)]
        for thread in threads:
            thread.start()
        beside: list[float] = []
        while not done.is_set() or len(beside) < RUNS:
            beside.append(seconds_of_a_run(modest))
        for thread in threads:
            thread.join()
        # Enabled again at once, the endpoint still gets nothing of what was dropped.
        assert greedy.http.patch("/webhooks", {"enabled": True}).status_code == 200
        for run in started:
            assert greedy.wait(run, timeout=60)["status"] == "completed"
        pending = "SELECT count(*) FROM webhooks_delivery WHERE status = 'PENDING'"
        stack.wait_for(lambda: database.execute(pending).fetchone() == (0,), 200, "the end of all deliveries")
        dead = database.execute(
            "SELECT count(*) FROM webhooks_delivery WHERE status = 'DEAD' AND chat_id = 'chat'"
        ).fetchone()
        new = greedy.finish("Hello")["id"]
        stack.wait_for(lambda: any(new.encode() in one.body for one in receiver.requests), 30, "a new event")
        assert not [one for one in receiver.requests if one.body == b"{}"]
    assert dead == (PENDING,)
    assert max(beside) <= max(2 * max(alone), FLOOR_SECONDS), f"alone {max(alone):.2f} s, beside {max(beside):.2f} s"
    assert disabling[0] < FLOOR_SECONDS
    require_correct_data(stack)


def seconds_of_a_run(driver: Driver) -> float:
    begun = time.monotonic()
    assert driver.finish("Hello")["status"] == "completed"
    return time.monotonic() - begun
