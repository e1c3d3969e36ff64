"""Tests of how runs execute with the version of the agent that they are pinned to."""

import pytest

from runs import catalogue
from runs.catalogue import agents
from runs.models import AgentModel, Provider
from tests.lifecycle.conftest import Bench

pytestmark = pytest.mark.django_db(transaction=True)


def save(**columns):
    agent, _ = agents.save("support", **{"display_name": "Support", "instructions": "Help."} | columns)
    catalogue.refresh()
    return agent


def test_an_agents_instructions_come_before_those_of_the_run(bench: Bench, requests, settings):
    save()
    bench.finish("/say Hi", agent="support", instructions="Rhyme.")
    bench.finish("/say Hi", agent="support")
    bench.finish("/say Hi", instructions="Rhyme.")
    bench.finish("/say Hi")
    own = settings.MODEL_SYSTEM_PROMPT
    assert [request.instructions for request in requests] == ["Help.\n\nRhyme.", "Help.", f"{own}\n\nRhyme.", own]


def test_the_model_gets_the_tools_and_parameters_of_the_agent(bench: Bench, requests):
    AgentModel.objects.filter(name="demo").update(parameters={"temperature": 1, "seed": 2})
    save(tools=["calculate", "ask_user"], parameters={"temperature": 0.5, "stop": ["END"]})
    bench.finish("/say Hi", agent="support")
    assert [tool.name for tool in requests[0].tools] == ["ask_user", "calculate"]
    assert requests[0].model.parameters == {"temperature": 0.5, "seed": 2, "stop": ["END"]}
    run = bench.finish('/call draw_chart {"title": "a", "series": [1]}\n/say {result}', agent="support")
    assert run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL"


def test_the_agents_model_is_asked_with_its_fallbacks(bench: Bench):
    columns = {"provider_model": "demo", "price_in": 0, "price_out": 0, "provider": Provider.objects.get(name="demo")}
    for name in ("large", "other"):
        AgentModel.objects.create(name=name, display_name=name, fallbacks=["demo"], **columns)
    save(model="large")
    run = bench.finish("/say Hi", agent="support")
    assert (run["requestedModel"], run["resolvedModel"]) == (None, "large")
    assert bench.finish("/say Hi", agent="support", model="other")["resolvedModel"] == "other"
    assert bench.finish("/flaky 400 1 Hi", agent="support")["resolvedModel"] == "demo"


def test_the_agents_threshold_and_budget_hold(bench: Bench):
    save(credit_approval_threshold=0)
    run = bench.ask('/call calculate {"expression": "1"}', agent="support")
    assert run["pendingWaitpoint"]["requestPayload"]["threshold"] == 0
    save(max_credits=1)
    assert bench.finish("/say Hi", agent="support")["errorCode"] == "BUDGET_EXCEEDED"


def test_live_runs_keep_the_bytes_of_their_version(bench: Bench, requests, settings):
    """Runs wait for an answer while the agent is saved again and again, then disabled."""
    settings.RUN_USER_LIMIT = 0
    waiting: dict[str, int] = {}
    for number in range(1, 9):
        tools = ["ask_user", "calculate"] if number % 2 else None
        version = save(instructions=f"Help {number}.", tools=tools, parameters={"seed": number}).version
        run = bench.start("/ask Which?\n/say {result}", agent="support", instructions=f"Run {number}.")
        assert run["agent"] == f"support@{version}"
        waiting[run["id"]] = number
    save(instructions="Other.", enabled=False)
    catalogue.forget()
    for run_id in waiting:
        run = bench.wait(run_id, "waiting")
        bench.respond(run, kind="CLARIFICATION", answer="This.")
    for run_id in waiting:
        assert bench.wait(run_id)["status"] == "completed"
    for run_id, number in waiting.items():
        chat_id = bench.wait(run_id)["chatId"]
        first, second = (request for request in requests if request.chat_id == chat_id)
        assert first.instructions == second.instructions == f"Help {number}.\n\nRun {number}."
        assert first.model.parameters == second.model.parameters == {"seed": number}
        assert first.tools == second.tools
        assert (len(first.tools) == 2) == bool(number % 2)
        assert second.messages[: len(first.messages)] == first.messages
