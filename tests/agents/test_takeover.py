"""Tests of runs with an agent and a schema whose worker dies: the next one has the same prompt and counts on."""

import pytest
from django.core.management import call_command

from runs import catalogue
from runs.catalogue import agents
from runs.models import OUTPUT_TOOL, Turn
from tests.driver import until
from tests.lifecycle.conftest import Bench, joined, vanish
from tests.tiers import slow

pytestmark = pytest.mark.django_db(transaction=True)

SCHEMA = {"type": "object", "required": ["city"]}
MISFIT, FITS = f"/call {OUTPUT_TOOL} {{}}", f'/call {OUTPUT_TOOL} {{"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("last", "status", "turns"),
    [*slow((FITS, "completed", 4)), (f"{MISFIT}\n{FITS}", "failed", 4)],
    ids=["fits", "misfit"],
)
def test_the_tries_are_counted_over_the_death_of_a_worker(bench: Bench, engines, requests, events, last, status, turns):
    agents.save("weather", display_name="Weather", instructions="Report.", output_schema=SCHEMA)
    catalogue.refresh()
    run = bench.start(f"{MISFIT}\n{MISFIT}\n/stream 40 50\n{last}", agent="weather", instructions="In Norway.")
    until(lambda: Turn.objects.count() == 2 and "message.delta" in [kind for kind, _ in events(run["id"])])
    vanish(bench.engine)
    agents.save("weather", display_name="Weather", instructions="Rhyme.")
    engines()
    run = bench.wait(run["id"], timeout=30)
    # The turn whose worker was lost is one of them.
    assert (run["status"], run["usage"]["turns"], run["agent"]) == (status, turns, "weather@1")
    assert run["errorCode"] == (None if status == "completed" else "OUTPUT_INVALID")
    assert run["output"] == ({"city": "Oslo"} if status == "completed" else None)
    assert run["answer"] == joined(events(run["id"]))
    third = [request for request in requests if request.turn_index == 3]
    assert len(third) == 2
    assert third[0].instructions == third[1].instructions == "Report.\n\nIn Norway."
    assert (third[0].tools, third[0].messages) == (third[1].tools, third[1].messages)
    call_command("check_invariants")
