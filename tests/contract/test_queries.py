"""The number of queries of an operation does not grow with the data: it is equal with 20 rows and with 1."""

import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from credits import ledger
from runs import catalogue
from tests.contract.routes import Operation, operations
from tests.contract.world import AG_UI_REQUEST, CHAT_REQUEST, World

pytestmark = pytest.mark.django_db

# The largest number of queries per operation, with those of the credential and of the transaction.
MOST_READING, MOST_WRITING = 5, 24
# An operation that is not listed sends an empty body.
BODIES: dict[str, dict[str, Any]] = {
    "POST api-keys": {"name": "workstation"},
    "POST session-tokens": {"sub": "user-4711"},
    "POST webhooks": {"url": "http://127.0.0.1:9/"},
    "PATCH webhooks": {"enabled": False},
    "POST chats": {"title": "A chat"},
    "PATCH chats/{chatId}": {"title": "Another"},
    "POST attachments": {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": 5},
    "POST chats/{chatId}/runs": {"message": "Hello", "onActiveRun": "enqueue"},
    "POST runs/{runId}/cancel": {},
    "POST ai-sdk/chat": CHAT_REQUEST,
    "POST ag-ui/agents/{agent}": AG_UI_REQUEST,
    "POST copilotkit/agent/{agent}/run": AG_UI_REQUEST,
    "POST copilotkit/agent/{agent}/connect": AG_UI_REQUEST,
    "POST users/{userId}/credits/grants": {"amount": "5", "reference": "pay_USER", "reason": "5 credits"},
    "POST users/{userId}/credits/grants/{ledgerId}/revoke": {"reference": "re_1", "reason": "Refunded"},
    "POST tool-invocations/{toolInvocationId}/result": {"result": "blue"},
    "POST waitpoints/{waitpointId}/respond": {"kind": "CLARIFICATION", "answer": "blue"},
}


def statements(operation: Operation, world: World) -> list[str]:
    """Call the operation as the world's user. Returns its SQL statements."""
    user = world.user
    client = operation.client(user)
    # The first request of a key writes the time of its use. That query must not count.
    if operation.credential == "serverKey":
        client.post("/api/v1/session-tokens", {}, format="json")
    client.get("/api/v1/me" if operation.surface == "session" else "/api/public/v1/key")
    ledger.account_for(user.pk)
    catalogue.refresh()
    body = json.dumps(BODIES.get(f"{operation.method} {operation.relative}", {})).replace("USER", str(user.pk)).encode()
    options = {"data": body, "content_type": "application/json"} if operation.takes_body else {}
    url = operation.url(world.ids) + ("?limit=100" if operation.action == "list" else "")
    with CaptureQueriesContext(connection) as queries:
        response = client.generic(operation.method, url, **options)
        if response.streaming:
            b"".join(response.streaming_content)
    assert 200 <= response.status_code < 300, response.content
    return [query["sql"] for query in queries]


@pytest.mark.parametrize("operation", operations(), ids=str)
def test_the_number_of_queries_does_not_grow_with_rows(
    operation: Operation, worlds: tuple[World, World], db: None
) -> None:
    few, many = (statements(operation, world) for world in worlds)
    assert len(few) == len(many), "\n".join(many)
    assert len(few) <= (MOST_WRITING if operation.takes_body or operation.method == "DELETE" else MOST_READING)
