"""Questions with a schema: what a tool's server asks the user for, and the answers that it may get."""

from typing import Any

import pytest

from config.kernel.jsontext import dumps
from runs.calls import ANSWER_DATA_MAX_BYTES
from runs.tools.questions import Dialogue, Question
from tests.factories import ToolInvocationFactory, WaitpointFactory

pytestmark = pytest.mark.django_db

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^([a-z0-9]+-?)+$"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def form(user: Any, schema: Any = None, **columns: Any) -> Any:
    dialogue = Dialogue(questions=(Question("name", "Who?", schema or SCHEMA),))
    of_user = {"run__user": user, "run__chat__user": user, "run__status": "waiting"}
    open_call = {"node_type": "mcp", "status": "DISPATCHING", "remote_task": dialogue.to_text()}
    call = ToolInvocationFactory(**of_user, **open_call)
    asked = {"question": "Who?", "toolInvocationId": call.pk, "schema": schema or SCHEMA}
    return WaitpointFactory(run=call.run, invocation=call, request_payload=asked, **columns)


def respond(session: Any, waitpoint: Any, **body: Any) -> Any:
    return session.post(f"/api/v1/waitpoints/{waitpoint.pk}/respond", {"kind": "CLARIFICATION", **body}, format="json")


def test_the_question(session, user):
    waitpoint = form(user)
    shown = session.get(f"/api/v1/waitpoints/{waitpoint.pk}").json()
    assert shown["requestPayload"] == {
        "question": "Who?",
        "toolInvocationId": waitpoint.invocation_id,
        "schema": SCHEMA,
    }


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "data"),
        ({"answer": "Ada"}, "answer"),
        ({"data": {}}, "data"),
        ({"data": {"name": 5}}, "data"),
        ({"data": "Ada"}, "data"),
        ({"data": None}, "data"),
        ({"data": {"name": "a"}, "declined": True}, "data"),
        ({"declined": False}, "declined"),
        ({"declined": "yes"}, "declined"),
        ({"data": {"name": "a" * ANSWER_DATA_MAX_BYTES}}, "data"),
        ({"data": {"name": "a" * 200 + "!"}}, "data"),
        ({"data": {"name": "a"}, "reason": "b"}, "reason"),
    ],
    ids=str,
)
def test_an_answer_that_does_not_fit(session, user, body, field):
    waitpoint = form(user)
    answer = respond(session, waitpoint, **body)
    assert answer.status_code == 400, answer.content
    assert list(answer.json()["error"]["details"]["fields"]) == [field]
    waitpoint.refresh_from_db()
    assert waitpoint.status == "PENDING"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/$defs/x"}] * 2}}, "$defs": {"x": {}}},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**30}}},
    ],
    ids=["references", "numbers"],
)
def test_unusual_schemas(session, user, schema):
    assert respond(session, form(user, schema), data={"a": "b"}).status_code in (200, 400)


def test_text_questions_take_no_data(session, user):
    waitpoint = WaitpointFactory(run__user=user, run__chat__user=user)
    for body in ({"data": {"a": 1}}, {"declined": True}):
        answer = respond(session, waitpoint, **body)
        assert answer.status_code == 400
        assert list(answer.json()["error"]["details"]["fields"]) == list(body)


def test_a_list_leaves_a_large_schema_out(session, user):
    waitpoint = form(user, SCHEMA | {"description": "x" * 9000})
    (run,) = session.get("/api/v1/runs").json()["items"]
    assert run["pendingWaitpoint"]["id"] == waitpoint.pk
    assert run["pendingWaitpoint"]["requestPayload"]["schema"] is None
    shown = session.get(f"/api/v1/runs/{waitpoint.run_id}").json()["pendingWaitpoint"]["requestPayload"]["schema"]
    assert len(dumps(shown)) > 9000
