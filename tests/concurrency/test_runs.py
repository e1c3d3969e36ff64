"""Tests of concurrent requests over HTTP, with real worker processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest

from tests.driver import Driver
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack


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

    for _ in range(5):
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
