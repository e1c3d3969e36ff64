"""When the streamed text of a run is written."""

import pytest

from runs import lifecycle
from tests.driver import until
from tests.lifecycle.conftest import joined

pytestmark = pytest.mark.django_db(transaction=True)

TURNS = '/say one\n/call calculate {"expression": "1"}\n/say two\n/wait 600'


def test_the_first_text_of_each_turn_does_not_wait_for_the_interval(bench, events, monkeypatch):
    monkeypatch.setattr(bench.engine.process.unwritten, "seconds", 600)
    run_id = bench.start(TURNS)["id"]
    until(lambda: joined(events(run_id)) == "one\n\ntwo")


def test_a_first_text_that_was_not_written_follows_with_the_next_write(bench, events, monkeypatch):
    write, refused = lifecycle.append_text, []

    def once_refused(batch):
        if not refused:
            refused.append(batch)
            raise RuntimeError("for once")
        return write(batch)

    monkeypatch.setattr(lifecycle, "append_text", once_refused)
    run_id = bench.start(TURNS)["id"]
    until(lambda: joined(events(run_id)) == "one\n\ntwo")
    assert refused
