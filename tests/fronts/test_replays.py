"""Streams of runs whose events are written here: long ones, overtaken text, and events that are pruned."""

import gc
import tracemalloc
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from runs import events
from runs.fronts.ai_sdk.chunks import Chunks
from runs.fronts.views import BEGINNING, Frames, Position
from runs.models import Run, RunEvent
from runs.streams.hub import Opening
from runs.streams.reads import existing
from tests.fronts.conftest import Frame, parse
from tests.streams.conftest import append, finish, make_run  # noqa: F401

pytestmark = pytest.mark.django_db


def sent(run: Run, after: Position = BEGINNING) -> Iterator[bytes]:
    opening = Opening(run.pk, 0, run.last_stream_index, run.last_stream_index, run.user_id)
    return Frames(Chunks(run), opening, after).existing()


def frames(run: Run, after: Position = BEGINNING) -> list[Frame]:
    return parse(b"".join(sent(run, after)))


def shown(found: list[Frame]) -> list[Any]:
    """What a client makes of it: the text of each step, with the resets that it got."""
    steps: list[Any] = []
    for _, part in found:
        kind = part if isinstance(part, str) else part["type"]
        if kind == "start-step":
            steps.append("")
        elif kind == "text-delta":
            steps[-1] += part["delta"]
        elif kind == "reset-step":
            steps[-1] = ""
    return steps


def delta(text: str) -> Any:
    return events.message_delta(text)


CALL = {"toolInvocationId": "inv_1", "name": "calculate", "turnIndex": 1, "callIndex": 1, "status": "COMPLETED"}


@pytest.mark.slow
def test_a_replay_of_ten_thousand_deltas_needs_no_memory_for_them(user, make_run):  # noqa: F811
    run = make_run(user)
    append(run, *(delta(f"{number:0800}") for number in range(10_000)))
    first = b"".join(sent(run))  # what is loaded on first use
    assert len(parse(first)) > 10_000
    gc.collect()
    gc.freeze()  # so that a collection costs little
    tracemalloc.start()
    try:
        for number, _ in enumerate(sent(run)):
            if not number % 200:
                gc.collect()  # what a query of a page leaves behind is no part of the replay
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert peak < len(first) / 2  # other threads of this process allocate too


def test_text_that_was_overtaken_is_left_out_of_a_replay(user, make_run):  # noqa: F811
    run = make_run(user)
    append(run, delta("First"), ("tool.completed", CALL | {"result": "2"}), delta("\n\nwrong"), delta(" and wrong"))
    append(run, events.message_reset(run), delta("First"), delta("\n\nstill wr"), events.message_reset(run))
    append(run, delta("First"))
    finish(run, "\n\nright")
    found = frames(run)
    assert shown(found) == ["First", "right"]
    assert not [part for _, part in found if part == {"type": "reset-step"}]
    assert "wrong" not in str(found)


def test_a_client_that_saw_overtaken_text_is_told_to_drop_it(user, make_run):  # noqa: F811
    """It got the stream as it happened up to any event, and continues there."""
    run = make_run(user)
    append(run, delta("First"), ("tool.completed", CALL | {"result": "2"}), delta("\n\nwrong"), delta(" and wrong"))
    append(run, events.message_reset(run), delta("First"), delta("\n\nri"))
    finish(run, "ght")
    rendered = Frames(Chunks(run), Opening(run.pk, 0, 0, 0, run.user_id))
    happened = existing(run.pk, 0, run.last_stream_index)
    live = [parse(rendered.of(event, rendered.rendering.facts_of(event))) for event in happened]
    assert shown(list(chain(*live))) == ["First", "right"]
    for index in range(len(live)):
        if seen := list(chain(*live[: index + 1])):
            assert shown(seen + frames(run, (index + 1, 99))) == ["First", "right"], index


def test_a_run_whose_events_are_pruned_shows_its_text(user, make_run):  # noqa: F811
    run = make_run(user)
    finish(run, "Hello ", "there")
    RunEvent.objects.filter(run=run).delete()
    found = frames(run)
    assert found[0][1]["messageId"] == run.assistant_message_id
    assert shown(found) == ["Hello there"]
    assert found[-1][1] == "[DONE]"
