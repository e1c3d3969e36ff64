"""What an operation asks the database does not grow with what there is: as many queries at 20 rows as at 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from credits import ledger
from runs import catalogue
from tests import factories
from tests.contract.routes import Operation, operations
from tests.contract.world import World, build

pytestmark = pytest.mark.django_db

ROWS = 20
# The most that an operation may ask, its caller's credential and its transaction included.
MOST_READING, MOST_WRITING = 5, 24
# An operation that is not here sends an empty body.
BODIES: dict[str, dict[str, Any]] = {
    "POST api-keys": {"name": "workstation"},
    "POST webhooks": {"url": "http://127.0.0.1:9/"},
    "PATCH webhooks": {"enabled": False},
    "POST chats": {"title": "A chat"},
    "PATCH chats/{chatId}": {"title": "Another"},
    "POST attachments": {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": 5},
    "POST chats/{chatId}/runs": {"message": "Hello", "onActiveRun": "enqueue"},
    "POST runs/{runId}/cancel": {},
    "POST waitpoints/{waitpointId}/respond": {"kind": "CLARIFICATION", "answer": "blue"},
}


@pytest.fixture(scope="module")
def worlds(django_db_setup: None, django_db_blocker: Any) -> Iterator[tuple[World, World]]:
    """A user with one of everything and one with ROWS, for all tests: each undoes what it does to them."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield build(factories.UserFactory(), 1), build(factories.UserFactory(), ROWS)
        transaction.set_rollback(True)


def statements(operation: Operation, world: World) -> list[str]:
    """What the operation asks, called by the world's user."""
    user = world.user
    client = factories.session_client(user) if operation.surface == "session" else factories.public_client(user)
    client.get("/api/v1/me" if operation.surface == "session" else "/api/public/v1/key")  # notes the key's use
    ledger.account_for(user.pk)
    catalogue.refresh()
    body = json.dumps(BODIES.get(f"{operation.method} {operation.relative}", {})).encode()
    options = {"data": body, "content_type": "application/json"} if operation.takes_body else {}
    url = operation.url(world.ids) + ("" if operation.takes_body or operation.parameters else "?limit=100")
    with CaptureQueriesContext(connection) as queries:
        response = client.generic(operation.method, url, **options)
        if response.streaming:
            b"".join(response.streaming_content)
    assert 200 <= response.status_code < 300, response.content
    return [query["sql"] for query in queries]


@pytest.mark.parametrize("operation", operations(), ids=str)
def test_as_many_queries_for_many_rows_as_for_one(operation: Operation, worlds: tuple[World, World], db: None) -> None:
    few, many = (statements(operation, world) for world in worlds)
    assert len(few) == len(many), "\n".join(many)
    assert len(few) <= (MOST_WRITING if operation.takes_body or operation.method == "DELETE" else MOST_READING)
