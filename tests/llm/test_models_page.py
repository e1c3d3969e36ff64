"""docs/models.md: its connections work, set up with the admin's forms as the page says; its tables are complete."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from runs import catalogue
from runs.catalogue.definitions import EFFORTS, ENVIRONMENT, KINDS, NAMES, PARAMETERS, PRESETS, Dialect
from runs.errors import FailureReason
from runs.models import AgentModel, Provider
from tests import factories
from tests.lifecycle import conftest as engine_fixtures
from tests.lifecycle.conftest import Bench
from tests.llm.model_server import ModelServer, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
engines = engine_fixtures.engines
bench = engine_fixtures.bench


def section(title: str) -> str:
    found = re.search(rf"^##+ {title}$(.*?)(?=^## |^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def table(text: str) -> list[list[str]]:
    """The rows of the only table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def stand_in() -> Iterator[ModelServer]:
    """A server that answers in all protocols."""
    with serving() as server:
        yield server


def submit(staff: Client, kind: str, wanted: dict[str, str], **more: str) -> None:
    """Fill in the form as a person does: by the labels of its fields and of its choices."""
    row = {"provider": Provider, "agentmodel": AgentModel}[kind].objects.filter(name=wanted["Name"]).first()
    url = reverse(f"admin:runs_{kind}_change", args=[row.pk]) if row else reverse(f"admin:runs_{kind}_add")
    form = staff.get(url).context["adminform"].form
    values: dict[str, Any] = {}
    by_label = {}
    for field in form:
        by_label[field.label] = field
        initial = field.initial() if callable(field.initial) else field.initial
        values[field.name] = json.dumps(initial) if isinstance(initial, dict) else "" if initial is None else initial
    for label, text in wanted.items():
        field = by_label[label]
        choices = {str(shown): value for value, shown in getattr(field.field, "choices", ())}
        values[field.name] = str(choices.get(text, text))
    values = {name: value for name, value in (values | more).items() if value is not False}
    answer = staff.post(url, values)
    assert answer.status_code == 302, answer.context["adminform"].form.errors


@pytest.mark.parametrize("title", ["OpenAI", "Anthropic", "Ollama", "vLLM", "OpenRouter"])
def test_a_connection_of_the_page_answers(title: str, bench: Bench, stand_in: ModelServer, settings: Any) -> None:
    text = section(title)
    forms: dict[str, dict[str, str]] = {"Provider": {}, "Model": {}}
    for form, label, value in table(text):
        forms[form][label] = value.strip("`")
    variables = dict(re.findall(r"^([A-Z_]+)=(\S+)$", text, re.MULTILINE))
    for name, value in variables.items():
        assert hasattr(settings, name)
        setattr(settings, name, value)
    staff = Client()
    staff.force_login(factories.UserFactory(is_staff=True, is_superuser=True))
    provider, address = forms["Model"]["Provider"], f"{stand_in.url}/v1"
    if provider in ENVIRONMENT:
        assert variables
        setattr(settings, f"{provider.upper()}_BASE_URL", address)
        if forms["Provider"]:
            submit(staff, "provider", forms["Provider"])
    else:
        submit(staff, "provider", forms["Provider"])
        row = Provider.objects.get(name=provider)
        preset = next(preset for preset in PRESETS.values() if preset.label == title)
        assert (row.kind, row.base_url, bool(row.api_key)) == (preset.kind, preset.base_url, preset.needs_key)
        # Another address forgets the key.
        key = {name: value for name, value in forms["Provider"].items() if name == "New API key"}
        submit(staff, "provider", {"Name": provider, "Address": address, **key})
    submit(staff, "agentmodel", forms["Model"])
    catalogue.forget()
    catalogue.refresh()

    run = bench.finish("Hello", model=forms["Model"]["Name"])
    assert (run["status"], run["resolvedModel"]) == ("completed", forms["Model"]["Name"])
    assert bench.content(run)
    (request,) = stand_in.requests
    assert request.body["model"] == forms["Model"]["Provider model"]
    keys = [*variables.values(), forms["Provider"].get("New API key", "")]
    sent = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    assert sent == next((key for key in keys if key), "")


def test_all_kinds_and_presets_are_on_the_page() -> None:
    assert [row[0] for row in table(section("Connect a provider"))] == [kind.label for kind in KINDS.values()]
    others = {row[0] for row in table(section("Other providers"))}
    own = set(re.findall(r"^### (.+)$", PAGE, re.MULTILINE))
    assert {preset.label for preset in PRESETS.values()} == others | own - {"Other providers"}


def test_the_table_of_the_dialect_is_complete() -> None:
    default = Dialect()
    documented = {name.strip("`"): json.loads(value.strip("`")) for name, value, _ in table(section("Dialect"))}
    assert documented == {name: getattr(default, column) for name, column in NAMES.items()}


def test_the_table_of_the_parameters_is_complete() -> None:
    rows = {name.strip("`"): value for name, value in table(section("Parameters"))}
    assert rows.keys() == PARAMETERS.keys()
    assert set(re.findall(r"`(\w+)`", rows["reasoningEffort"])) == set(EFFORTS)


def test_the_table_of_the_reasons_is_true() -> None:
    rows = [[cell.strip("`") for cell in row] for row in table(section("Retries and fallbacks"))]
    assert rows == [[reason, "yes" if reason.retried else "", reason.code, reason.sentence] for reason in FailureReason]
