"""*Try it* on the page of an HTTP tool: who may, what is sent, what is shown and logged."""

import json
from base64 import b64encode
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from standardwebhooks.webhooks import Webhook

from credits.models import LedgerEntry
from runs.models import Run, Tool
from tests.tools import conftest as tool_fixtures

pytestmark = pytest.mark.django_db
server = tool_fixtures.server
SECRET = b64encode(b"a tool's own signing secret").decode()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def tool(server: Any) -> Tool:
    return Tool.objects.create(
        name="weather",
        display_name="Weather",
        description="The weather.",
        node_type="http",
        url=server.url,
        price=500_000,
        input_schema=SCHEMA,
        secret_headers='{"Authorization": "Bearer sesame"}',
        signing_secret=SECRET,
    )


def page(tool: Tool) -> str:
    return reverse("admin:runs_tool_try_it", args=[tool.pk])


def logged(tool: Tool) -> list[str]:
    return [entry.get_change_message() for entry in LogEntry.objects.filter(object_id=str(tool.pk))]


def test_one_request_as_in_a_run_shows_what_the_model_would_be_told(boss, server, tool):
    server.answers({"result": "Sunny <b>", "creditUsed": 0.25})
    change = boss.get(reverse("admin:runs_tool_change", args=[tool.pk])).content.decode()
    assert page(tool) in change
    assert SECRET not in change
    assert boss.get(page(tool)).status_code == 200
    assert server.received == []
    shown = boss.post(page(tool), {"arguments": '{"city": "Ulm"}'}).content.decode()
    (received,) = server.received
    sent = Webhook(SECRET).verify(received.body, received.headers)
    assert (sent["input"], sent["userId"]) == ({"city": "Ulm"}, boss.person.username)
    assert sent["invocationId"] == received.headers["Idempotency-Key"]
    assert received.headers["Authorization"] == "Bearer sesame"
    for text in ("Sunny &lt;b&gt;", "0.25", sent["invocationId"]):
        assert text in shown
    assert SECRET not in shown
    assert "sesame" not in shown
    assert logged(tool) == ["Tried it: it answered."]
    assert not Run.objects.exists()
    assert not LedgerEntry.objects.exclude(type="GRANT").exists()


def test_a_failure_is_shown(boss, server, tool, settings):
    server.status, server.body = 500, b"out of order"
    shown = boss.post(page(tool), {"arguments": '{"city": "Ulm"}'}).content.decode()
    assert "HTTP status 500: out of order" in shown
    settings.OUTBOUND_ALLOW_PRIVATE = False
    assert "not public" in boss.post(page(tool), {"arguments": '{"city": "Ulm"}'}).content.decode()
    assert len(server.received) == 1
    assert logged(tool) == ["Tried it: TOOL_ERROR."] * 2


def test_a_slow_tool_is_waited_for_as_long_as_the_setting_says(boss, server, tool, settings):
    server.hold, settings.STAFF_REQUEST_SECONDS = True, 0.2
    assert "TOOL_TIMEOUT" in boss.post(page(tool), {"arguments": '{"city": "Ulm"}'}).content.decode()


def test_an_input_that_does_not_fit_is_not_sent(boss, server, tool):
    for arguments in ("", "{", "[]", "{}", '{"city": 1}', '{"city": "\0"}'):
        assert boss.post(page(tool), {"arguments": arguments}).status_code == 200, arguments
        assert server.received == [], arguments


def test_a_tool_whose_secrets_cannot_be_read_is_not_called(boss, server, tool, settings):
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    shown = boss.post(page(tool), {"arguments": '{"city": "Ulm"}'}).content.decode()
    assert "ENCRYPTION_KEYS" in shown
    assert server.received == []


def test_only_staff_who_may_change_tools_can_try_http_tools(boss, sign_in, client, server, tool):
    for role in ("viewer", "support", "billing"):
        staff = sign_in(role)
        assert staff.post(page(tool), {"arguments": '{"city": "Ulm"}'}).status_code == 403
        assert page(tool) not in staff.get(reverse("admin:runs_tool_change", args=[tool.pk])).content.decode()
    assert client.post(page(tool), {"arguments": "{}"}).status_code == 302
    for other in (Tool.objects.get(name="calculate"), Tool(pk=10**9)):
        assert boss.post(page(other), {"arguments": json.dumps({"expression": "1"})}).status_code == 404
    assert server.received == []
