"""Concurrent requests over HTTP, with real worker processes: of several that exclude each other one counts, and many
runs at once spend the credits of one account, or a run its budget, but never more than there is, and most of it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest

from tests.driver import FINAL, Driver
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

CREDITS = Decimal(100)
# The demo model uses all that each request may, and reports more. A turn takes a moment, so that all runs hold at once.
GREEDY = "/wait 0.2\n/usage 1000000 1000000\n/say x"
BUDGET = '/usage 100 100\n/call calculate {"expression": "1"}\n/usage 1000000 1000000\n/say x'
SPENT = ("CAPTURE", "USAGE")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    environment = {"SIGNUP_CREDITS": str(CREDITS), "RUN_USER_LIMIT": "0"}
    without = ("beat", "webhooks", "maintenance")
    with Stack(**given_services(), run_workers=2, environment=environment, without=without) as running:
        yield running


def at_once(count: int, call: Callable[[], Any]) -> list[Any]:
    """Make ``count`` calls that start together, and return their answers."""
    barrier = Barrier(count)

    def one(_: int) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_only_one_of_many_concurrent_answers_is_accepted(stack: Stack) -> None:
    driver = Driver(stack.session())
    run = driver.ask('/call draw_chart {"title": "T", "series": [1]}\n/say done')
    before = float(driver.credits()["balance"])
    path = f"/waitpoints/{run['pendingWaitpoint']['id']}/respond"
    answers = at_once(24, lambda: driver.http.post(path, {"kind": "CREDIT_APPROVAL", "approved": True}))
    assert [answer.status_code for answer in answers] == [200] * 24
    assert len({answer.content for answer in answers}) == 1
    run = driver.wait(run["id"])
    assert run["status"] == "completed"
    assert len(run["toolInvocations"]) == 1
    assert before - float(driver.credits()["balance"]) == pytest.approx(12, abs=0.5)
    assert driver.credits()["held"] == "0"


def test_only_one_of_concurrent_approval_and_refusal_is_accepted(stack: Stack) -> None:
    driver = Driver(stack.session())

    def answer(run: dict[str, Any]) -> None:
        path = f"/waitpoints/{run['pendingWaitpoint']['id']}/respond"
        answers = iter([True, False] * 6)
        posted = at_once(12, lambda: driver.http.post(path, {"kind": "CREDIT_APPROVAL", "approved": next(answers)}))
        assert len({answer.content for answer in posted}) == 1

    for _ in range(3):
        run = driver.ask('/call draw_chart {"title": "T", "series": [1]}', maxCredits=20)
        answer(run)
        end = driver.wait(run["id"])["toolInvocations"][0]
        approved = driver.http.get(f"/waitpoints/{run['pendingWaitpoint']['id']}").json()["resolvedPayload"]["approved"]
        assert end["status"] == ("COMPLETED" if approved else "REFUSED")
        assert driver.credits()["held"] == "0"


def test_concurrent_requests_with_one_idempotency_key_start_one_run(stack: Stack) -> None:
    http = stack.session("keys")
    chat = Driver(http).chat()
    answers = at_once(
        20,
        lambda: http.post(
            f"/chats/{chat}/runs", {"message": "Hello"}, headers={"Idempotency-Key": "the-same"}, timeout=30
        ),
    )
    assert {answer.status_code for answer in answers} <= {201, 409}
    started = [answer for answer in answers if answer.status_code == 201]
    assert started
    assert len({answer.json()["id"] for answer in started}) == 1
    for answer in answers:
        if answer.status_code == 409:
            assert answer.json()["error"]["code"] == "IDEMPOTENCY_KEY_IN_USE"
    assert len(http.get(f"/chats/{chat}/runs").json()["items"]) == 1


def test_only_one_of_many_concurrent_starts_in_a_chat_is_accepted(stack: Stack) -> None:
    http = stack.session("racer")
    chat = Driver(http).chat()
    answers = at_once(16, lambda: http.post(f"/chats/{chat}/runs", {"message": "/wait 1"}, timeout=30))
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 15


def test_enqueued_runs_execute_one_at_a_time(stack: Stack) -> None:
    driver = Driver(stack.session("queue"))
    chat = driver.chat()
    started = at_once(8, lambda: driver.start("/say x", chat, onActiveRun="enqueue"))
    ended = [driver.wait(run["id"]) for run in started]
    assert {run["status"] for run in ended} == {"completed"}
    spans = sorted((run["startedAt"], run["finishedAt"]) for run in ended)
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start


def pages(driver: Driver, path: str) -> Iterator[dict[str, Any]]:
    cursor = ""
    while cursor is not None:
        page = driver.http.get(f"{path}?limit=100{cursor and f'&cursor={cursor}'}").json()
        yield from page["items"]
        cursor = page["nextCursor"]


def lowest(rows: list[dict[str, Any]]) -> Decimal:
    """The lowest available credits of an account, by its rows from the oldest on."""
    signs = {"GRANT": 1, "HOLD": -1, "RELEASE": 1, "CAPTURE": 0, "USAGE": 0}
    available, least = Decimal(0), CREDITS
    for row in rows:
        available += signs[row["type"]] * Decimal(row["amount"])
        least = min(least, available)
    return least


def test_parallel_runs_use_an_account_up_and_no_more(stack: Stack) -> None:
    """The credits suffice for about sixteen turns."""
    driver = Driver(stack.session("greedy"))
    driver.credits()

    def start(_: int) -> bool:
        answer = driver.http.post(f"/chats/{driver.chat()}/runs", {"message": GREEDY})
        assert answer.status_code in (201, 402), answer.text
        return bool(answer.status_code == 201)

    with ThreadPoolExecutor(4) as pool:
        accepted = sum(pool.map(start, range(60)))
    ended: dict[str, dict[str, Any]] = {}

    def all_ended() -> bool:
        ended.update((run["id"], run) for run in pages(driver, "/runs") if run["status"] in FINAL)
        return len(ended) == accepted

    stack.wait_for(all_ended, 100, f"the end of {accepted} runs")
    assert {run["errorCode"] for run in ended.values()} == {None, "INSUFFICIENT_CREDITS"}
    rows = list(pages(driver, "/me/credits/ledger"))[::-1]
    spent = sum(Decimal(row["amount"]) for row in rows if row["type"] in SPENT)
    assert lowest(rows) >= 0
    assert CREDITS * 9 / 10 <= spent <= CREDITS
    left = format((CREDITS - spent).normalize(), "f")
    assert driver.credits() == {"balance": left, "held": "0", "available": left, "expiring": []}
    stack.manage("check_invariants")


def test_parallel_runs_use_their_budgets_up_and_no_more(stack: Stack) -> None:
    driver = Driver(stack.session("thrifty"))
    budgets = [2, 20] * 5
    with ThreadPoolExecutor(4) as pool:
        begin: Callable[[int], Any] = lambda budget: driver.start(BUDGET, maxCredits=budget)  # noqa: E731
        started = list(pool.map(begin, budgets))
    ended = [driver.wait(run["id"]) for run in started]
    rows = list(pages(driver, "/me/credits/ledger"))
    for run, budget in zip(ended, budgets, strict=True):
        assert (run["status"], [call["status"] for call in run["toolInvocations"]]) == ("completed", ["COMPLETED"])
        assert run["totalCreditsUsed"] <= budget
        own = [row for row in rows if row["runId"] == run["id"] and row["type"] in SPENT]
        assert sum(Decimal(row["amount"]) for row in own) <= budget
        # The full output limit costs 6.1 credits a turn.
        assert run["totalCreditsUsed"] >= min(budget * 0.9, 6)
    stack.manage("check_invariants")
