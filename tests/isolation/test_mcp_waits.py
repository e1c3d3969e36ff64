"""Calls of the MCP endpoint that wait: MCP_WAITS_PER_USER, then 429; other users' calls wait as before."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.driver import FINAL, Driver, until
from tests.isolation.compare import assert_isolated
from tests.mcp.test_client import start
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

LIMIT = 4
CALLS = 12


def test_calls_of_one_user_that_wait_do_not_stop_the_waits_of_others(stack: StreamStack) -> None:
    greedy, modest = Driver(stack.public("greedy-mcp")), Driver(stack.public("modest-mcp"))
    chats = [greedy.chat() for _ in range(CALLS)]

    def call(user: str, chat: str, message: str) -> requests.Response:
        return stack.public(user).post(f"{stack.url}/api/mcp", start(chat, message, 60), timeout=90)

    def act() -> None:
        answer = call("modest-mcp", modest.chat(), "Hello").json()
        assert answer["result"]["structuredContent"]["status"] == "completed"

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        answers: list[requests.Response] = []

        def wait(chat: str) -> None:
            answers.append(call("greedy-mcp", chat, "/wait 600"))

        with ThreadPoolExecutor(CALLS) as pool:
            calls = [pool.submit(wait, chat) for chat in chats]
            until(lambda: len(answers) == CALLS - LIMIT)
            refused = list(answers)
            runs = greedy.http.get("/runs?limit=100").json()["items"]
            live = [run for run in runs if run["status"] not in FINAL]
            yield
            assert len(answers) == len(refused), "a call ended early"
            for run in live:
                greedy.cancel(run["id"])
            for each in calls:
                each.result(60)
        assert [answer.status_code for answer in refused] == [429] * (CALLS - LIMIT)
        for answer in refused:
            assert answer.json()["error"]["code"] == "RATE_LIMITED"
            assert int(answer.headers["Retry-After"]) >= 1
        # A refused call has started no run.
        assert len(live) == LIMIT
        ended: list[dict[str, Any]] = [
            answer.json()["result"]["structuredContent"] for answer in answers[CALLS - LIMIT :]
        ]
        assert [run["status"] for run in ended] == ["cancelled"] * LIMIT

    assert_isolated(act, waiting)


def test_a_call_that_does_not_wait_needs_no_place(stack: StreamStack) -> None:
    driver = Driver(stack.public("quick-mcp"))
    for _ in range(LIMIT * 2):
        body = start(driver.chat(), "Hello", 0)
        assert driver.http.post(f"{stack.url}/api/mcp", body).status_code == 200
