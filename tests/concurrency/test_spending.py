"""Many runs at once spend the credits of one account, and a run its budget: never more than there is, and most of it.

The provider is the demo model, which uses all that each request may, and reports more.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

from tests.driver import FINAL, Driver
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

CREDITS = Decimal(100)
# A turn that takes a moment, so that all runs hold at once.
GREEDY = "/wait 0.2\n/usage 1000000 1000000\n/say x"
BUDGET = '/usage 100 100\n/call calculate {"expression": "1"}\n/usage 1000000 1000000\n/say x'
SPENT = ("CAPTURE", "USAGE")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    environment = {"SIGNUP_CREDITS": str(CREDITS), "RUN_USER_LIMIT": "0"}
    with Stack(**given_services(), run_workers=2, environment=environment) as running:
        yield running


def start_many(driver: Driver, count: int) -> int:
    """Start the runs, four at a time, each in its own chat. Returns how many were accepted."""

    def start(_: int) -> bool:
        answer = driver.http.post(f"/chats/{driver.chat()}/runs", {"message": GREEDY})
        assert answer.status_code in (201, 402), answer.text
        return bool(answer.status_code == 201)

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(start, range(count)))


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


@pytest.mark.parametrize("count", [20, 300])
def test_parallel_runs_use_an_account_up_and_no_more(stack: Stack, count: int) -> None:
    driver = Driver(stack.session(f"greedy{count}"))
    driver.credits()
    accepted = start_many(driver, count)
    ended: dict[str, dict[str, Any]] = {}

    def all_ended() -> bool:
        ended.update((run["id"], run) for run in pages(driver, "/runs") if run["status"] in FINAL)
        return len(ended) == accepted

    stack.wait_for(all_ended, 200, f"the end of {accepted} runs")
    assert {run["errorCode"] for run in ended.values()} == {None, "INSUFFICIENT_CREDITS"}
    rows = list(pages(driver, "/me/credits/ledger"))[::-1]
    spent = sum(Decimal(row["amount"]) for row in rows if row["type"] in SPENT)
    assert lowest(rows) >= 0
    assert CREDITS * 9 / 10 <= spent <= CREDITS
    assert driver.credits() == {
        "balance": text(CREDITS - spent),
        "held": "0",
        "available": text(CREDITS - spent),
        "expiring": [],
    }
    stack.manage("check_invariants")


def text(credits: Decimal) -> str:
    return format(credits.normalize(), "f")


@pytest.mark.parametrize("budget", [2, 20])
def test_parallel_runs_use_their_budgets_up_and_no_more(stack: Stack, budget: int) -> None:
    driver = Driver(stack.session(f"thrifty{budget}"))
    stack.manage("grant_credits", f"thrifty{budget}", "1000", "--reason", "for the test")
    with ThreadPoolExecutor(4) as pool:
        begin: Callable[[int], Any] = lambda _: driver.start(BUDGET, maxCredits=budget)  # noqa: E731
        started = list(pool.map(begin, range(10)))
    for run in [driver.wait(run["id"]) for run in started]:
        assert (run["status"], [call["status"] for call in run["toolInvocations"]]) == ("completed", ["COMPLETED"])
        assert run["totalCreditsUsed"] <= budget
        rows = [row for row in pages(driver, "/me/credits/ledger") if row["runId"] == run["id"]]
        assert sum(Decimal(row["amount"]) for row in rows if row["type"] in SPENT) <= budget
        # The full output limit costs 6.1 credits a turn.
        assert run["totalCreditsUsed"] >= min(budget * 0.9, 6)
    stack.manage("check_invariants")
