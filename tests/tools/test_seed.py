"""The catalogue's first contents: what interface and code promise of them."""

import pytest

from config.kernel.money import to_text
from runs.catalogue import seeds
from runs.models import AgentModel, Tool
from runs.tools import builtin, check_schema, files
from tests.tools.conftest import ROWS


def test_the_tools_have_their_prices():
    assert {name: to_text(row["price"]) for name, row in ROWS.items()} == {
        "ask_user": "0",
        "web_fetch": "1",
        "create_file": "1",
        "draw_chart": "12",
        "calculate": "0.1",
    }


def test_every_tool_but_the_engines_own_is_built_in():
    assert set(builtin.TOOLS) | {"ask_user"} == set(ROWS)


@pytest.mark.parametrize("row", seeds.TOOLS, ids=lambda row: row["name"])
def test_every_tool_is_a_sound_row(row):
    Tool(**row).clean_fields()
    check_schema(row["input_schema"])


def test_the_demo_model_is_a_sound_row_and_the_only_default():
    (row,) = seeds.MODELS
    AgentModel(**row).clean_fields()
    assert (row["name"], row["price_in"], row["price_out"], row["is_default"]) == ("demo", 500_000, 1_500_000, True)


def test_the_schema_and_the_storage_agree_on_file_names():
    schema = ROWS["create_file"]["input_schema"]["properties"]["fileName"]
    assert schema["pattern"] == files.FILE_NAME_PATTERN
    assert schema["maxLength"] == files.FILE_NAME_MAX_CHARS
