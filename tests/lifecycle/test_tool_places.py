"""Tests of a user's share of the tool calls of a process: the wait for a place costs the call none of its time."""

import asyncio
import time

import pytest

from runs import catalogue
from runs.models import Tool
from runs.tools import dispatch
from runs.tools.base import ToolResult
from tests.driver import until
from tests.lifecycle.conftest import Bench

OWN_SECONDS = 1.0


class Outside:
    """What the tool ``outside`` does: each call waits for ``release``, and the first longer than its own time."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.limits: list[float] = []

    async def execute(self, definition, input, context):
        self.begun.append(time.monotonic())
        self.limits.append(context.timeout_seconds)
        await asyncio.sleep(float(input["seconds"]))
        return ToolResult("ok")


@pytest.fixture
def outside(monkeypatch, settings) -> Outside:
    settings.TOOL_CALLS_PER_USER = 1
    made = Outside()
    monkeypatch.setitem(dispatch.TYPES, "http", dispatch.ToolType("", made.execute, needs_url=True))
    return made


@pytest.fixture
def bench(outside, engines, session) -> Bench:
    engine = engines()
    for name, seconds in (("outside", OWN_SECONDS), ("patient", 60)):
        Tool.objects.create(
            name=name, display_name=name, description=name, node_type="http", url="https://example.com", price=0,
            approval="never", repeatable=True, timeout_seconds=seconds, input_schema={"type": "object"},
        )  # fmt: skip
    catalogue.refresh()
    return Bench(session, engine)


@pytest.mark.slow
def test_waiting_for_a_place_does_not_count_against_the_calls_time(bench: Bench, outside: Outside):
    run = bench.finish('/call patient {"seconds": 1.5}\n/call outside {"seconds": 0.7}\n/call outside {"seconds": 0}')
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED"] * 3, run
    assert outside.begun[1] - outside.begun[0] > OWN_SECONDS  # one at a time, and longer than the call's own time
    assert outside.limits[1:] == [OWN_SECONDS, OWN_SECONDS]


def test_a_call_is_dispatched_when_it_has_its_place(bench: Bench, outside: Outside, events):
    run = bench.start('/call patient {"seconds": 1}\n/call outside {"seconds": 0}')["id"]
    until(lambda: bench.engine.process.tool_places.waiting)
    assert [call["status"] for call in bench.get(run)["toolInvocations"]] == ["DISPATCHING", "PENDING"]
    bench.wait(run)
    told = [(kind, data["name"]) for kind, data in events(run) if kind in ("tool.started", "tool.completed")]
    assert told == [(kind, name) for name in ("patient", "outside") for kind in ("tool.started", "tool.completed")]


def test_the_calls_own_time_still_limits_the_call(bench: Bench, outside: Outside):
    run = bench.finish('/call patient {"seconds": 0.2}\n/call outside {"seconds": 30}')
    assert [call["errorCode"] for call in run["toolInvocations"]] == [None, "TOOL_TIMEOUT"]


def test_a_cancel_ends_the_wait(bench: Bench, outside: Outside):
    other = bench.start('/call patient {"seconds": 30}')["id"]
    until(lambda: outside.begun)
    waiting = bench.start('/call outside {"seconds": 0}')["id"]
    until(lambda: bench.engine.process.tool_places.waiting)
    bench.cancel(waiting)
    assert bench.wait(waiting, timeout=20)["status"] == "cancelled"
    assert len(outside.begun) == 1
    bench.cancel(other)
    bench.wait(other)


def test_the_runs_time_limit_ends_the_wait(bench: Bench, outside: Outside, settings):
    other = bench.start('/call patient {"seconds": 30}')["id"]
    until(lambda: outside.begun)
    settings.RUN_TIMEOUT_SECONDS = 1.0
    run = bench.finish('/call outside {"seconds": 0}')
    assert (run["status"], run["errorCode"]) == ("failed", "RUN_TIMEOUT")
    assert len(outside.begun) == 1
    bench.cancel(other)
    bench.wait(other)


@pytest.mark.slow
def test_a_stop_of_the_process_ends_the_wait(bench: Bench, outside: Outside, engines):
    bench.start('/call patient {"seconds": 2}\n/call outside {"seconds": 0}')
    until(lambda: bench.engine.process.tool_places.waiting and outside.begun)
    begun = time.monotonic()
    bench.engine.stop(0)
    assert time.monotonic() - begun < 20
    assert len(outside.begun) == 1
    engines()
    until(lambda: len(outside.begun) >= 3)
