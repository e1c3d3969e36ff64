"""Tests of what a run gets from its agent and from its request, through HTTP."""

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from chats.services import make_chat
from runs import catalogue
from runs.catalogue import agents
from runs.models import OUTPUT_TOOL, Agent, AgentModel, Provider, Run, Tool
from tests.mcp.rpc import call

pytestmark = pytest.mark.django_db


@pytest.fixture
def support(user: Any) -> Agent:
    tools = ["calculate", "ask_user"]
    limits = {"credit_approval_threshold": 5_000_000, "max_credits": 20_000_000}
    agent, _ = agents.save("support", display_name="Support", instructions="Help.", tools=tools, **limits)
    catalogue.refresh()
    return agent


def start(client: Any, surface: str = "/api/v1", **body: Any) -> Any:
    chat = client.post(f"{surface}/chats", {}, format="json").json()["id"]
    return client.post(f"{surface}/chats/{chat}/runs", {"message": "Hello"} | body, format="json")


def problem(answer: Any) -> dict[str, list[str]]:
    assert answer.status_code == 400, answer.content
    fields: dict[str, list[str]] = answer.json()["error"]["details"]["fields"]
    assert not Run.objects.exists()
    return fields


@pytest.mark.parametrize("surface", ["/api/v1", "/api/public/v1"])
def test_a_run_is_pinned_to_the_version_that_is_current_when_it_starts(support, session, public, surface):
    client = session if surface == "/api/v1" else public
    first = start(client, surface, agent="support").json()
    assert (first["agent"], first["output"], first["requestedModel"]) == ("support@1", None, None)
    agents.save("support", display_name="Support", instructions="Help more.")
    catalogue.refresh()
    assert start(client, surface, agent="support").json()["agent"] == "support@2"
    assert start(client, surface, agent="support@1").json()["agent"] == "support@1"
    assert start(client, surface).json()["agent"] is None
    assert client.get(f"{surface}/runs/{first['id']}").json()["agent"] == "support@1"
    assert [run["agent"] for run in client.get(f"{surface}/runs").json()["items"]] == [
        None,
        "support@1",
        "support@2",
        "support@1",
    ]


def test_the_agent_gives_what_the_request_leaves_out(support, session):
    start(session, agent="support")
    run = Run.objects.get()
    assert (run.tools, run.credit_approval_threshold, run.max_credits) == (
        ["calculate", "ask_user"],
        5_000_000,
        20_000_000,
    )


def test_tools_are_narrowed_and_the_budget_is_lowered_by_the_request(support, session):
    answer = start(session, agent="support", tools=["calculate"], maxCredits=3, creditApprovalThreshold=7)
    run = Run.objects.get(pk=answer.json()["id"])
    assert (run.tools, run.credit_approval_threshold, run.max_credits) == (["calculate"], 7_000_000, 3_000_000)
    run = Run.objects.get(pk=start(session, agent="support", tools=[]).json()["id"])
    assert run.tools == []


def test_a_request_cannot_raise_the_budget(support, session):
    start(session, agent="support", maxCredits=21)
    assert Run.objects.get().max_credits == 20_000_000


def test_a_request_cannot_add_a_tool(support, session):
    fields = problem(start(session, agent="support", tools=["calculate", "draw_chart", "no_such_tool"]))
    assert fields == {
        "tools.1": ["The agent support@1 has no tool named draw_chart."],
        "tools.2": ["There is no tool named no_such_tool."],
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"agent": "suport"}, "agent: There is no agent named suport. Did you mean support?"),
        ({"model": "dmo"}, "model: There is no model named dmo. Did you mean demo?"),
        ({"tools": ["calculat", "ask_use"]}, "tools.0: There is no tool named calculat. Did you mean calculate?"),
    ],
)
def test_the_name_that_was_probably_meant_is_named(support, session, body, message):
    answer = start(session, **body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_an_agent_with_all_tools_takes_any(session):
    agents.save("free", display_name="Free")
    catalogue.refresh()
    assert start(session, agent="free", tools=["draw_chart"]).status_code == 201
    assert Run.objects.get().tools == ["draw_chart"]


@pytest.mark.parametrize("name", ["other", "support@2", "support@99999999999999999999", "Support", "support x", " "])
def test_an_agent_that_is_not_there(support, session, name):
    assert list(problem(start(session, agent=name))) == ["agent"]


def test_a_disabled_agent_and_its_versions_start_nothing(support, session, public):
    Agent.objects.update(enabled=False)
    catalogue.refresh()
    for name in ("support", "support@1"):
        assert problem(start(session, agent=name)) == {"agent": [f"There is no agent named {name}."]}
        assert list(problem(start(public, "/api/public/v1", agent=name))) == ["agent"]


def test_an_agent_whose_model_is_not_offered(session):
    columns = {"provider_model": "demo", "price_in": 0, "price_out": 0, "provider": Provider.objects.get(name="demo")}
    model = AgentModel.objects.create(name="large", display_name="Large", **columns)
    agents.save("support", display_name="Support", model="large")
    catalogue.refresh()
    assert start(session, agent="support").status_code == 201
    Run.objects.all().delete()
    model.enabled = False
    model.save()
    catalogue.refresh()
    assert problem(start(session, agent="support")) == {"agent": ["The agent's model, large, is not offered."]}
    assert start(session, agent="support", model="demo").json()["requestedModel"] == "demo"


def test_a_new_agent_is_known_at_once(session):
    catalogue.refresh()
    Agent.objects.create(name="new", display_name="New", version=1).versions.create(number=1)
    assert start(session, agent="new").json()["agent"] == "new@1"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"agent": ""}, "agent"),
        ({"agent": 3}, "agent"),
        ({"agent": "a" * 101}, "agent"),
        ({"instructions": ""}, "instructions"),
        ({"instructions": "a" * 20_001}, "instructions"),
        ({"instructions": ["a"]}, "instructions"),
        ({"outputSchema": []}, "outputSchema"),
        ({"outputSchema": "object"}, "outputSchema"),
        ({"outputSchema": {}}, "outputSchema"),
        ({"outputSchema": {"type": "string"}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "required": 1}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "$schema": "https://example.com/schema"}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "$schema": "http://json-schema.org/draft-04/schema#"}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "$schema": None}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "properties": {"a": {"pattern": "(a"}}}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "$ref": "http://127.0.0.1/schema"}}, "outputSchema"),
        ({"outputSchema": {"type": "object", "description": "a" * 16 * 1024}}, "outputSchema"),
        ({"agents": "support"}, "agents"),
    ],
)
def test_wrong_fields_are_named(support, session, body, field):
    assert list(problem(start(session, **body))) == [field]


def test_the_drafts_that_libraries_name_are_accepted(session):
    for draft in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"):
        assert start(session, outputSchema={"type": "object", "$schema": draft}).status_code == 201
        Run.objects.all().delete()


def test_nothing_of_it_may_be_null_as_if_it_were_left_out(session):
    answer = start(session, agent=None, instructions=None, outputSchema=None)
    assert (answer.status_code, answer.json()["agent"]) == (201, None)


def test_instructions_can_be_forbidden_to_api_keys(support, session, public, settings):
    assert start(public, "/api/public/v1", instructions="Rhyme.").status_code == 201
    Run.objects.all().delete()
    settings.RUN_INSTRUCTIONS_PUBLIC = False
    assert list(problem(start(public, "/api/public/v1", instructions="Rhyme."))) == ["instructions"]
    assert start(public, "/api/public/v1", instructions=None, agent="support").status_code == 201
    assert start(session, instructions="Rhyme.").status_code == 201


def test_the_catalogue_lists_enabled_agents(support, session, public):
    agents.save("hidden", display_name="Hidden", enabled=False)
    agents.save("free", display_name="Free", description="Does all.", model="demo")
    agents.save("free", display_name="Free", description="Does all.")
    catalogue.refresh()
    none: dict[str, Any] = {"typicalCredits": None, "model": None}
    expected = [
        none | {"name": "free", "displayName": "Free", "description": "Does all.", "version": 2, "tools": None},
        none
        | {
            "name": "support",
            "displayName": "Support",
            "description": "",
            "version": 1,
            "tools": ["calculate", "ask_user"],
        },
    ]
    for client, surface in ((session, "/api/v1"), (public, "/api/public/v1")):
        assert client.get(f"{surface}/agents").json() == {"items": expected, "nextCursor": None}


def test_runs_are_filtered_by_agent_and_by_version(support, session, public):
    runs = [start(session, agent="support").json()["id"], start(session).json()["id"]]
    agents.save("support", display_name="Support")
    agents.save("supporter", display_name="Supporter")
    catalogue.refresh()
    runs += [start(session, agent=name).json()["id"] for name in ("support", "supporter")]

    def listed(query: str) -> list[str]:
        found = [item["id"] for item in session.get(f"/api/v1/runs?{query}").json()["items"]]
        assert [item["id"] for item in public.get(f"/api/public/v1/runs?{query}").json()["items"]] == found
        return found

    assert listed("agent=support") == [runs[2], runs[0]]
    assert listed("agent=support@1") == [runs[0]]
    assert listed("agent=support%402&status=queued,failed") == [runs[2]]
    assert listed("agent=other") == listed("agent=support@") == listed("agent=support@9") == []
    for query in ("agent=", f"agent={'a' * 101}", "agent=%00"):
        answer = session.get(f"/api/v1/runs?{query}")
        assert (answer.status_code, list(answer.json()["error"]["details"]["fields"])) == (400, ["agent"])


def test_a_run_with_an_agent_costs_one_query_more_at_most(support, user, session):
    chat = make_chat(user)[0].pk

    def queries(**body: Any) -> int:
        sent = {"message": "Hi", "onActiveRun": "enqueue"} | body
        with CaptureQueriesContext(connection) as asked:
            answer = session.post(f"/api/v1/chats/{chat}/runs", sent, format="json")
        assert answer.status_code == 201
        return len(asked)

    queries()
    plain = queries()
    catalogue.forget()
    catalogue.refresh()
    assert queries(agent="support") <= plain + 1
    assert queries(agent="support") == plain


def test_no_tool_has_the_name_of_the_output():
    tool = Tool(name=OUTPUT_TOOL, display_name="x", description="x", node_type="builtin", price=0)
    with pytest.raises(ValidationError, match=OUTPUT_TOOL):
        tool.validate_constraints()
    with pytest.raises(IntegrityError), transaction.atomic():
        tool.save()


def test_runs_are_started_with_agents_through_mcp(support, public, settings):
    given = {"chatId": call(public, "create_chat")["structuredContent"]["id"], "message": "Hello"}
    schema = {"type": "object"}
    run = call(public, "start_run", **given, agent="support", instructions="Rhyme.", outputSchema=schema)
    assert run["structuredContent"]["agent"] == "support@1"
    assert (Run.objects.get().instructions, Run.objects.get().output_schema) == ("Rhyme.", schema)
    settings.RUN_INSTRUCTIONS_PUBLIC = False
    refused = call(public, "start_run", **given, instructions="Rhyme.", onActiveRun="enqueue")
    assert (refused["isError"], Run.objects.count()) == (True, 1)
