"""The shipped example, the page about the file, and the columns that the file must have."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from django.db import models

from runs.catalogue.entries import ENTRIES
from runs.models import Agent, AgentModel, AgentVersion, Provider, Tool
from tests.catalogue.conftest import EXAMPLE
from tests.stack.process import ROOT, python, run

SHIPPED = (ROOT / "catalogue.example.yaml").read_text()
# Lines with # directly before a name or a bracket are settings that the example leaves out.
WHOLE = re.sub(r"^( *)#(?=\w+:)", r"\1", SHIPPED, flags=re.MULTILINE)
# Identities, and what the service counts itself.
NOT_IN_THE_FILE = {"id", "agent", "number", "version", "created_at"}


def test_the_example_is_applied_without_any_variable(command, monkeypatch, shown):
    for name in ("LOCAL_KEY", "WEATHER_KEY", "HOOK_SECRET"):
        monkeypatch.delenv(name)
    command.applied(SHIPPED)
    assert {"llama", "demo"} == shown("models").keys()
    assert shown("models")["demo"]["isDefault"]
    assert shown("agents")["support"]["tools"] == ["get_weather", "ask_user"]


def test_the_whole_example_has_every_field(command, monkeypatch, shown):
    monkeypatch.setenv("LOCAL_PROJECT", "p")
    command.applied(WHOLE.replace("https://app.example.com", "http://127.0.0.1:9"))
    assert "is as" in command.applied(WHOLE.replace("https://app.example.com", "http://127.0.0.1:9"))
    assert shown("models")["llama"]["isDefault"]
    names = {name for table in ENTRIES.values() for name in table.fields} - {"secret"}
    written = set(re.findall(r"^ +-? ?(\w+):", WHOLE, re.MULTILINE))
    assert names - written == {"enabled", "remoteName"}


def test_the_file_of_the_page_is_applied(command):
    page = (ROOT / "docs" / "catalogue.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command.applied(block)
    said = command.apply(block.replace("inputPrice", "inputPrise"))
    assert f"{command.path}, line 7: models.llama.inputPrise: Unknown field. Did you mean inputPrice?" in said


@pytest.mark.parametrize(
    ("columns", "table"),
    [([Provider], "providers"), ([AgentModel], "models"), ([Tool], "tools"), ([Agent, AgentVersion], "agents")],
)
def test_every_column_of_the_catalogue_is_in_the_file(columns: list[type[models.Model]], table: str) -> None:
    names = {column.name for table in columns for column in table._meta.concrete_fields}
    entry = ENTRIES[table]
    written = {field.source for field in entry.fields.values()} | {f"{column}_source" for column in entry.addresses}
    assert written == names - NOT_IN_THE_FILE


def prepare(folder: Path, catalogue: Path) -> subprocess.CompletedProcess[str]:
    """The preparation of ``make run``."""
    own = {"VAR_DIR": str(folder), "CATALOGUE_FILE": str(catalogue), "OUTBOUND_ALLOW_PRIVATE": "1"}
    others = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    return run(python("-m", "config.local", "prepare"), others | own)


@pytest.mark.slow
def test_make_run_applies_the_file_and_stops_at_a_mistake(tmp_path):
    file = tmp_path / "catalogue.yaml"
    file.write_text(EXAMPLE)
    first = prepare(tmp_path, file)
    assert first.returncode == 0, first.stderr
    assert "user admin, password" in first.stdout
    assert "models.llama: added" in first.stderr
    assert "The catalogue is as" in prepare(tmp_path, file).stderr
    file.write_text("modles: []")
    wrong = prepare(tmp_path, file)
    assert wrong.returncode == 1
    assert f"{file}, line 1: modles: Unknown field. Did you mean models?" in wrong.stderr
