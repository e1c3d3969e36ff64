"""Values that are declared in one table are read from that table, in the code and in the API document."""

import ast
import pickle
import re

import pytest

from config.api import openapi
from config.kernel.choices import StatusChoices
from config.kernel.errors import DomainError
from runs.errors import CallError, RunError
from runs.events import StreamType
from runs.models import InvocationStatus, RunStatus
from tests.architecture.test_rules import ROOT, sources
from webhooks.events import Event

# The names of the colours that unfold has for the labels of a column.
TONES = {"default", "info", "success", "warning", "danger"}


@pytest.mark.parametrize("statuses", StatusChoices.__subclasses__(), ids=lambda statuses: statuses.__qualname__)
def test_each_status_has_a_value_and_a_tone(statuses: type[StatusChoices]) -> None:
    assert {status.tone for status in statuses} <= TONES
    assert {status.final for status in statuses} == {True, False}
    for status in statuses:
        assert status == status.value
        assert statuses(status.value) is pickle.loads(pickle.dumps(status)) is status


def test_only_the_catalogue_contains_names_of_webhook_events() -> None:
    # A stream event may have the name of a webhook event.
    names = {event.value for event in Event} - {event.stream_type for event in Event}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if path != ROOT / "webhooks" / "events.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert wrong == []


def test_each_webhook_event_names_a_stream_event_and_one_of_its_statuses() -> None:
    """The app of webhooks may not import the app that declares them. An event of a type without statuses has none."""
    kinds: dict[str, type[StatusChoices]] = {
        StreamType.RUN_STATUS: RunStatus,
        StreamType.TOOL_COMPLETED: InvocationStatus,
    }
    statuses = {kind.value: [""] for kind in StreamType} | {kind: found.values for kind, found in kinds.items()}
    assert [event for event in Event if event.stream_status not in statuses[event.stream_type]] == []


def test_the_api_document_lists_every_error_code() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (`.*?`) \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    listing = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert listing == {(status, code) for status, found in openapi.errors().items() for code in found}


def test_every_kind_of_refusal_has_a_documented_code() -> None:
    known = openapi.errors()
    waiting, wrong = [DomainError], []
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.code not in known[kind.status]:
            wrong.append(kind.__qualname__)
    assert wrong == []


def test_the_api_document_lists_the_codes_of_runs_and_of_tool_calls() -> None:
    tables = re.findall(
        r"^\| `errorCode` \| Cause \|\n\|---\|---\|\n((?:\|.*\n)+)",
        (ROOT / "docs" / "resources.md").read_text(),
        re.MULTILINE,
    )
    listing = [
        {code for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", cell)}
        for table in tables
    ]
    assert listing == [set(RunError), set(CallError)]
