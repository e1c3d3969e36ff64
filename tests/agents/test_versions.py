"""Tests of what staff write of agents: versions that never change, and the checks of their content."""

import pytest
from rest_framework.exceptions import ValidationError

from config.database.protected import FieldIsProtected
from runs import catalogue
from runs.catalogue import agents
from runs.models import OUTPUT_TOOL, Agent, AgentVersion
from tests.threads import side_by_side

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

pytestmark = pytest.mark.django_db


def nested(depth: int) -> dict[str, object]:
    """A schema of so many levels."""
    schema: dict[str, object] = {"type": "object"}
    for _ in range((depth - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def save(**changes):
    return agents.save("support", **{"display_name": "Support", "instructions": "Help."} | changes)


def test_a_version_is_made_only_when_its_content_changes():
    content = {"tools": ["calculate"], "parameters": {"temperature": 0.2}, "output_schema": SCHEMA}
    agent, changed = save(**content)
    assert ("parameters" in changed, agent.version) == (True, 1)
    assert save(**content)[1] == []
    agent, changed = save(**content, description="Helps.")
    assert (changed, agent.version) == (["description"], 1)
    assert save(max_credits=1)[0].version == 2
    assert [version.number for version in AgentVersion.objects.all()] == [2, 1]
    assert catalogue.find_agent("support").max_credits == 1
    assert catalogue.find_agent("support@1").output_schema == SCHEMA


def test_the_order_of_tools_means_nothing():
    assert save(tools=["calculate", "ask_user"])[0].version == 1
    assert save(tools=["ask_user", "calculate"])[0].version == 1


def test_a_chosen_version_is_the_current_one_and_the_next_has_a_new_number():
    save()
    save(instructions="Help more.")
    agents.choose("support", 1)
    catalogue.forget()
    assert catalogue.find_agent("support").instructions == "Help."
    assert save(instructions="Help most.")[0].version == 3
    with pytest.raises(AgentVersion.DoesNotExist):
        agents.choose("support", 4)


@pytest.mark.parametrize("reference", ["other", "support@2", "support@0", "support@", "support@x", "", "support\0"])
def test_a_name_or_version_that_is_not_there(reference):
    save()
    assert catalogue.find_agent(reference) is None


def test_a_disabled_agent_is_not_there():
    save(enabled=False)
    assert catalogue.find_agent("support") is None
    assert catalogue.find_agent("support@1") is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("instructions", "a" * 100_001),
        ("instructions", "a\0"),
        ("model", "no-such-model"),
        ("tools", ["no_such_tool"]),
        ("tools", ["calculate", "calculate"]),
        ("tools", [OUTPUT_TOOL]),
        ("tools", "calculate"),
        ("parameters", {"temperature": 3}),
        ("parameters", []),
        ("credit_approval_threshold", -1),
        ("max_credits", 0),
        ("max_credits", 2**63),
        ("output_schema", {}),
        ("output_schema", {"type": "array"}),
        ("output_schema", {"type": "object", "properties": 1}),
        ("output_schema", {"type": "object", "properties": {"a": {"pattern": "(?=a)"}}}),
        ("output_schema", {"type": "object", "description": "a" * 16 * 1024}),
        ("output_schema", nested(17)),
        ("display_name", ""),
        ("display_name", "a" * 101),
        ("description", "a" * 20_001),
    ],
)
def test_wrong_content_names_its_column_and_changes_nothing(column, value):
    with pytest.raises(ValidationError) as error:
        save(**{column: value})
    assert list(error.value.detail) == [column]
    assert not Agent.objects.exists()


@pytest.mark.parametrize("name", ["", "a b", "support@2", "a" * 65])
def test_a_wrong_name(name):
    with pytest.raises(ValidationError) as error:
        agents.save(name, display_name="Support")
    assert list(error.value.detail) == ["name"]


def test_the_largest_content_is_stored():
    agent, _ = save(
        instructions="ä" * 100_000, tools=[], parameters={}, output_schema=nested(15), max_credits=2**63 - 1
    )
    assert agent.version == 1


def test_nothing_can_change_a_version():
    save()
    version = AgentVersion.objects.get()
    with pytest.raises(FieldIsProtected):
        version.save()
    with pytest.raises(FieldIsProtected):
        AgentVersion.objects.update(instructions="Other.")


@pytest.mark.django_db(transaction=True)
def test_saves_at_the_same_moment_make_a_version_each():
    saved = side_by_side(8, lambda number: save(instructions=f"Help {number}.")[0])
    assert sorted(agent.version for agent in saved) == list(range(1, 9))
    for agent in saved:
        assert AgentVersion.objects.get(number=agent.version).instructions.startswith("Help")
    assert Agent.objects.get().version == 8
