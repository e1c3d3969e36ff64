"""Tests of the rows of a new catalogue, and of the rows that a new version adds to an existing one."""

from pathlib import Path

import pytest
from django.apps import apps
from django.db.models.signals import post_migrate

from config.kernel.money import to_text
from runs.catalogue import seeds
from runs.models import AgentModel, Provider, Tool
from runs.tools import builtin
from runs.tools.base import BuiltinTool
from runs.tools.builtin import TOOLS
from runs.tools.schema import check_schema


def test_the_tools_have_their_prices():
    prices = {
        "ask_user": "0",
        "web_fetch": "1",
        "create_file": "1",
        "draw_chart": "12",
        "calculate": "0.1",
        "long_job": "2",
    }
    assert {name: to_text(TOOLS[name].price) for name in prices} == prices


def test_every_module_of_the_package_is_a_tool_with_its_name():
    assert set(TOOLS) == {path.stem for path in Path(builtin.__file__).parent.glob("*.py")} - {"__init__"}


def test_the_engine_handles_one_tool_itself():
    assert [name for name, tool in TOOLS.items() if tool.execute is None] == ["ask_user"]


@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_every_tool_is_a_valid_row(tool):
    Tool(**tool.row()).clean_fields()
    check_schema(tool.input_schema)


def test_the_demo_model_is_a_valid_row_and_the_only_default():
    (row,) = seeds.MODELS
    (provider,) = [Provider(**values) for values in seeds.PROVIDERS if values["name"] == row["provider"]]
    AgentModel(**row | {"provider": provider}).clean_fields(exclude=["provider"])
    assert (row["name"], row["price_in"], row["price_out"], row["is_default"]) == ("demo", 500_000, 1_500_000, True)


@pytest.mark.django_db
def test_a_new_version_adds_its_tools_and_leaves_other_rows_unchanged(monkeypatch):
    Tool.objects.filter(name="draw_chart").update(price=7, enabled=False)
    Tool.objects.filter(name="calculate").delete()
    monkeypatch.setitem(TOOLS, "guess", BuiltinTool("guess", "Guess", "Guesses.", {"type": "object"}, 5, execute=None))
    before = {row.pk: row for row in Tool.objects.all()}

    config = apps.get_app_config("runs")
    post_migrate.send(sender=config, app_config=config, verbosity=0, interactive=False, using="default")

    added = Tool.objects.exclude(pk__in=before)
    assert {row.name: (row.price, row.node_type, row.enabled) for row in added} == {
        "guess": (5, "builtin", True),
        "calculate": (100_000, "builtin", True),
    }
    assert [(row.price, row.enabled) for row in Tool.objects.filter(name="draw_chart")] == [(7, False)]
