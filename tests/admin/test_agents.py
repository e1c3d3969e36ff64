"""The admin's pages of agents: each save a version, the versions side by side, and the way back to one."""

import time
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from runs import catalogue
from runs.admin.agents import difference
from runs.models import Agent, AgentModel, AgentVersion, Provider, Tool
from tests.admin.conftest import make_run

pytestmark = pytest.mark.django_db

ADD = reverse("admin:runs_agent_add")


def form(**changes: Any) -> dict[str, Any]:
    return {
        "name": "support",
        "display_name": "Support",
        "description": "Helps.",
        "enabled": "on",
        "instructions": "Help.\r\nBe kind.",
        "tools": ["calculate", "ask_user"],
        "parameters": '{"temperature": 0.5}',
        "credit_approval_threshold": "5",
        "max_credits": "20",
        "output_schema": "{}",
    } | changes


def page(name: str, agent: Agent) -> str:
    return reverse(f"admin:runs_agent_{name}", args=[agent.pk])


@pytest.fixture
def agent(boss) -> Agent:
    assert boss.post(ADD, form()).status_code == 302
    return Agent.objects.get()


def problems(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200
    return dict(answer.context["adminform"].form.errors)


def logged() -> list[str]:
    return [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]


def test_a_save_makes_a_version(boss, agent):
    version = AgentVersion.objects.get()
    assert (version.instructions, version.model, version.tools) == ("Help.\nBe kind.", None, ["calculate", "ask_user"])
    assert (version.credit_approval_threshold, version.max_credits) == (5_000_000, 20_000_000)
    assert (version.parameters, version.output_schema) == ({"temperature": 0.5}, None)
    boss.post(page("change", agent), form(display_name="Helpdesk"))
    schema = '{"type": "object", "properties": {"a": {"minimum": 0.5}}}'
    boss.post(page("change", agent), form(all_tools="on", model="demo", output_schema=schema))
    agent.refresh_from_db()
    assert (agent.display_name, agent.version, AgentVersion.objects.count()) == ("Support", 2, 2)
    second = AgentVersion.objects.get(number=2)
    assert (second.model, second.tools, second.output_schema["properties"]["a"]) == ("demo", None, {"minimum": 0.5})
    assert logged()[1:] == ["No new version: display_name.", "Version 2: display_name, model, tools, output_schema."]


def test_the_form_shows_the_current_version_and_saves_it_unchanged(boss, agent):
    answer = boss.get(page("change", agent))
    given = answer.context["adminform"].form
    shown = {name: given[name].value() for name in given.fields}
    assert shown["tools"] == ["calculate", "ask_user"]
    sent = {name: value for name, value in shown.items() if value not in (None, False)}
    boss.post(page("change", agent), {**sent, "credit_approval_threshold": "5", "max_credits": "20"})
    assert AgentVersion.objects.count() == 1
    assert logged()[-1] == "No new version: nothing changed."


def test_true_is_not_one(boss, agent):
    schema = '{"type": "object", "properties": {"a": {"const": %s}}}'
    for value in ("1", "true"):
        boss.post(page("change", agent), form(output_schema=schema % value))
    assert AgentVersion.objects.get(number=3).output_schema["properties"]["a"]["const"] is True


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"display_name": ""}, "display_name"),
        ({"instructions": "a" * 100_001}, "instructions"),
        ({"model": "no-such-model"}, "model"),
        ({"tools": ["no_such_tool"]}, "tools"),
        ({"parameters": '{"temperature": 3}'}, "parameters"),
        ({"parameters": "["}, "parameters"),
        ({"credit_approval_threshold": "-1"}, "credit_approval_threshold"),
        ({"max_credits": "0"}, "max_credits"),
        ({"output_schema": '{"type": "array"}'}, "output_schema"),
        ({"output_schema": '{"type": "object", "required": 1}'}, "output_schema"),
    ],
)
def test_mistakes_are_named_at_their_field(boss, changes, field):
    assert list(problems(boss.post(ADD, form(**changes)))) == [field]
    assert not Agent.objects.exists()


def test_a_name_is_taken_once_and_never_changes(boss, agent):
    assert list(problems(boss.post(ADD, form()))) == ["name"]
    boss.post(page("change", agent), form(name="other"))
    assert Agent.objects.get().name == "support"
    assert boss.post(page("delete", agent), {"post": "yes"}).status_code == 403


def test_a_tool_that_is_deleted_meanwhile_is_an_error_not_a_loss(boss, agent):
    Tool.objects.filter(name="calculate").delete()
    assert list(problems(boss.post(page("change", agent), form(display_name="Helpdesk")))) == ["tools"]
    assert AgentVersion.objects.get().tools == ["calculate", "ask_user"]


def test_a_model_that_is_deleted_is_an_error_not_the_default_one(boss, agent):
    provider = Provider.objects.get(name="demo")
    AgentModel.objects.create(name="gone", provider=provider, provider_model="x", price_in=0, price_out=0)
    boss.post(page("change", agent), form(model="gone"))
    AgentModel.objects.get(name="gone").delete()
    shown = boss.get(page("change", agent)).context["adminform"].form
    assert ("gone", "gone") in shown.fields["model"].choices
    assert list(problems(boss.post(page("change", agent), form(model=shown["model"].value())))) == ["model"]
    assert AgentVersion.objects.order_by("number").last().model == "gone"


def test_versions_are_compared_side_by_side(boss, agent):
    boss.post(page("change", agent), form(instructions="Help.\nBe <b>brief</b>.", max_credits="30"))
    text = boss.get(page("versions", agent)).content.decode()
    assert "<td>Be kind.</td><td>Be &lt;b&gt;brief&lt;/b&gt;.</td>" in text
    assert "<td>budget: 20</td><td>budget: 30</td>" in text
    assert "<b>brief</b>" not in text
    turned = boss.get(page("versions", agent) + "?left=2&right=1").content.decode()
    assert "<td>budget: 30</td><td>budget: 20</td>" in turned
    for query in ("left=3", "right=99999999999", "left=x&right=9"):
        assert boss.get(f"{page('versions', agent)}?{query}").status_code in (200, 404)


def test_staff_go_back_to_a_version(boss, agent):
    boss.post(page("change", agent), form(instructions="Other."))
    assert boss.post(page("versions", agent), {"version": "1"}).status_code == 302
    catalogue.forget()
    assert catalogue.find_agent("support").number == 1
    assert boss.get(page("change", agent)).context["adminform"].form["instructions"].value() == "Help.\nBe kind."
    assert logged()[-1] == "Chose version 1."
    for wrong in ("3", "", "x", "-1", "9" * 30):
        assert boss.post(page("versions", agent), {"version": wrong}).status_code == 404
    boss.post(page("change", agent), form(instructions="Third."))
    catalogue.forget()
    assert catalogue.find_agent("support").number == 3


def test_the_versions_lead_to_their_runs(boss, agent, user):
    with_it = make_run(user, agent="support@1", agent_name="support")
    without = make_run(user)
    link = f"{reverse('admin:runs_run_changelist')}?agent=support%401"
    assert link in boss.get(page("versions", agent)).content.decode()
    listed = boss.get(link).content.decode()
    assert with_it.pk in listed
    assert without.pk not in listed
    make_run(user, agent="support@1", agent_name="support", status="failed", error_code="MODEL_ERROR")
    boss.post(page("change", agent), form(instructions="Other.", max_credits="5"))
    second, first = boss.get(page("versions", agent)).context["versions"]
    assert (second["author"], second["changed"]) == (boss.person.username, "instructions, max credits")
    assert (first["author"], first["use"]["count"], first["use"]["success"]) == (boss.person.username, 2, "50%")
    assert first["use"]["credits"] == "1.75"
    assert "support@1" in boss.get(reverse("admin:runs_run_change", args=[with_it.pk])).content.decode()


def test_those_who_may_view_see_everything_and_change_nothing(sign_in, agent):
    viewer = sign_in("viewer")
    assert "support" in viewer.get(reverse("admin:runs_agent_changelist")).content.decode()
    assert "Be kind." in viewer.get(page("change", agent)).content.decode()
    text = viewer.get(page("versions", agent)).content.decode()
    assert "Be kind." in text
    assert "Make current" not in text
    assert viewer.post(page("versions", agent), {"version": "1"}).status_code == 403
    assert viewer.post(page("change", agent), form()).status_code == 403
    stranger = sign_in()
    assert stranger.get(page("versions", agent)).status_code == 403
    assert stranger.get(page("change", agent)).status_code == 403


def test_the_largest_versions_are_compared_in_a_moment():
    left, right = ["a", "b"] * 1000, ["a", "a", "b"] * 600
    begun = time.process_time()
    assert len(difference(left, right)) > 1000
    assert difference([*left, "c"], right) is None
    assert time.process_time() - begun < 20


def test_equal_lines_far_from_a_difference_are_left_out():
    before = [str(number) for number in range(20)]
    lines = difference(before, [*before[:10], "new", *before[11:]])
    equal = [[(str(number), str(number), False) for number in numbers] for numbers in (range(7, 10), range(11, 14))]
    assert lines == [*equal[0], ("10", "new", True), *equal[1]]
