"""What users, staff and models send as JSON is kept as it came, on both databases: the order of keys, and each digit of
a number.
"""

import json
from typing import Any

import pytest

from config.kernel.jsontext import from_text, to_text
from runs.models import OUTPUT_TOOL, Tool
from tests.lifecycle.conftest import Bench

pytestmark = pytest.mark.django_db(transaction=True)

# jsonb would sort the keys by length and letter. No double has these numbers.
GIVEN = '{"zz":123456789012345678901234567890,"b":0.12345678901234567890123,"a":{"y":1,"x":[2.50]}}'
SCHEMA = (
    '{"type":"object","properties":{"zz":{"type":"integer","minimum":123456789012345678901234567890},'
    '"b":{"type":"number"},"a":{"type":"object"}},"required":["zz"]}'
)


def test_a_run_keeps_order_and_digits(bench: Bench, requests: Any, events: Any) -> None:
    Tool.objects.create(
        name="echo", node_type="http", price=0, url="http://127.0.0.1:9/", input_schema=from_text(SCHEMA)
    )
    message = json.dumps(f"/call echo {GIVEN}\n/call {OUTPUT_TOOL} {GIVEN}")
    body = f'{{"message":{message},"metadata":{{"zz":"1","a":"2"}},"outputSchema":{SCHEMA}}}'
    path = f"/api/v1/chats/{bench.chat()}/runs"
    started = bench.client.post(path, data=body, content_type="application/json")
    assert started.status_code == 201, started.content
    run = bench.wait(started.json()["id"])
    assert (run["status"], run["toolInvocations"][0]["errorCode"]) == ("completed", "TOOL_ERROR")
    shown = bench.client.get(f"/api/v1/runs/{run['id']}").content.decode()
    for part in (f'"input":{GIVEN}', f'"output":{GIVEN}', '"metadata":{"zz":"1","a":"2"}'):
        assert part in shown
    tools = {tool.name: to_text(tool.input_schema) for tool in requests[-1].tools}
    assert (tools["echo"], tools[OUTPUT_TOOL]) == (SCHEMA, SCHEMA)
    assert f'"input":{GIVEN}' in bench.client.get(f"/api/v1/runs/{run['id']}/stream").getvalue().decode()
