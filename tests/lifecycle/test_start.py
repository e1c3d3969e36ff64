"""Tests of the order of checks when a run starts: chat, body, active run of the chat, credits."""

from __future__ import annotations

from typing import Any

import pytest

from chats.services import create_chat
from credits import ledger
from tests import factories
from tests.credits.helpers import spend

pytestmark = pytest.mark.django_db

UNKNOWN = {"message": "Hello", "model": "nobody-s"}


def start(client: Any, chat_id: str, body: dict[str, Any]) -> tuple[int, str]:
    answer = client.post(f"/api/v1/chats/{chat_id}/runs", body, format="json")
    return answer.status_code, answer.json()["error"]["code"] if answer.status_code != 201 else ""


@pytest.mark.parametrize(
    "body", [UNKNOWN, {"message": "Hello", "tools": ["none"]}, {"message": ""}, {"message": "Hello"}]
)
def test_chat_of_another_user_is_404_for_any_body(session, body):
    anothers = create_chat(factories.UserFactory()).pk
    assert start(session, anothers, body) == start(session, "chat_none", body) == (404, "NOT_FOUND")


def test_body_is_checked_before_the_chat_and_the_chat_before_the_credits(session, user):
    chat_id = create_chat(user).pk
    assert start(session, chat_id, {"message": "/wait 1"}) == (201, "")
    spend(user, 100_000_000, chat=chat_id)
    assert ledger.available(user.pk) <= 0
    assert start(session, chat_id, UNKNOWN) == (400, "VALIDATION_ERROR")
    assert start(session, chat_id, {"message": "Hello"}) == (409, "RUN_IN_PROGRESS")
    assert start(session, create_chat(user).pk, {"message": "Hello"}) == (402, "INSUFFICIENT_CREDITS")
