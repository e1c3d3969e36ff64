"""Tools of the catalogue in a run, by the API: what the tool gets, and what the model and the caller get of it."""

import json
from base64 import b64encode

from standardwebhooks.webhooks import Webhook

from runs import catalogue
from runs.models import Tool
from tests.lifecycle import conftest as engine_fixtures

engines = engine_fixtures.engines
bench = engine_fixtures.bench
SECRET = b64encode(b"a tool's own signing secret").decode()


def add_tool(url: str, **columns) -> None:
    columns = {"node_type": "http", "url": url, "price": 1_000_000, "description": "Looks something up."} | columns
    Tool.objects.create(name="lookup", display_name="Look up", **columns)
    catalogue.forget()


def test_a_signed_call_names_the_user_and_any_answer_is_its_result(bench, server, user):
    add_tool(server.url, signing_secret=SECRET)
    server.body = b"Sunny, 21 \xc2\xb0C"
    run = bench.finish('/call lookup {"city": "Ulm"}\n/say It is {result}.')
    assert run["answer"] == "It is Sunny, 21 °C."
    (call,) = run["toolInvocations"]
    assert (call["status"], call["result"], call["creditUsed"]) == ("COMPLETED", "Sunny, 21 °C", 1)
    (received,) = server.received
    assert Webhook(SECRET).verify(received.body, received.headers) == {
        "invocationId": call["id"],
        "runId": run["id"],
        "chatId": run["chatId"],
        "userId": user.username,
        "input": {"city": "Ulm"},
    }
    assert received.headers["Idempotency-Key"] == received.headers["webhook-id"] == call["id"]


def test_the_model_is_told_why_a_call_failed(bench, server):
    add_tool(server.url)
    server.status, server.body = 422, json.dumps({"detail": "There is no city Ulmm."}).encode()
    run = bench.finish('/call lookup {"city": "Ulmm"}\n/say {result}')
    told = 'lookup answered with HTTP status 422: {"detail": "There is no city Ulmm."}'
    assert run["answer"] == f"TOOL_ERROR: {told}"
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"], call["errorMessage"]) == ("FAILED", "TOOL_ERROR", told)
    assert (call["result"], call["creditUsed"]) == (None, 0)
