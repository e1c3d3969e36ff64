"""Tests of the order of checks when a run starts: chat, body, active run of the chat, credits."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from chats.models import Chat
from chats.services import delete_chat, make_chat, rename_chat
from credits import ledger
from runs import services
from runs.models import AgentModel, Provider, Run, Tool
from runs.tools import schema
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
    anothers = make_chat(factories.UserFactory())[0].pk
    assert start(session, anothers, body) == start(session, "chat_none", body) == (404, "NOT_FOUND")


def test_body_is_checked_before_the_chat_and_the_chat_before_the_credits(session, user):
    chat_id = make_chat(user)[0].pk
    assert start(session, chat_id, {"message": "/wait 1"}) == (201, "")
    spend(user, 100_000_000, chat=chat_id)
    assert ledger.account_for(user.pk).available <= 0
    assert start(session, chat_id, UNKNOWN) == (400, "VALIDATION_ERROR")
    assert start(session, chat_id, {"message": "Hello"}) == (409, "RUN_IN_PROGRESS")
    assert start(session, make_chat(user)[0].pk, {"message": "Hello"}) == (402, "INSUFFICIENT_CREDITS")


def test_a_name_that_staff_have_just_added_is_known_at_once(session, user):
    # The process has read the catalogue.
    assert start(session, make_chat(user)[0].pk, {"message": "Hello"}) == (201, "")
    AgentModel.objects.create(
        name="new", display_name="New", provider=Provider.objects.get(name="demo"), provider_model="demo", price_in=0,
        price_out=0,
    )  # fmt: skip
    Tool.objects.create(name="new_tool", display_name="New", node_type="http", url="http://x.test/", price=0)
    assert start(session, make_chat(user)[0].pk, {"message": "Hello", "model": "new"}) == (201, "")
    assert start(session, make_chat(user)[0].pk, {"message": "Hello", "tools": ["new_tool"]}) == (201, "")


def start_another(chat: Chat) -> None:
    services.start_run(chat.user, chat.pk, message="the other")


def start_and_cancel_another(chat: Chat) -> None:
    start_another(chat)
    for run in Run.objects.filter(chat=chat):
        services.cancel_run(run)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.parametrize(
    ("change", "answer", "title", "messages"),
    [
        (delete_chat, (404, "NOT_FOUND"), None, []),
        (lambda chat: rename_chat(chat, "New"), (201, ""), "New", ["Hello"]),
        (start_another, (409, "RUN_IN_PROGRESS"), "the other", ["the other"]),
        (start_and_cancel_another, (201, ""), "the other", ["the other", "Hello"]),
    ],
)
def test_a_start_sees_what_another_request_does_to_the_chat_meanwhile(
    session: Any, user: Any, monkeypatch: Any, change: Callable[[Chat], None], answer: Any, title: Any, messages: Any
) -> None:
    chat = make_chat(user)[0]
    add_message = services.add_message
    changes = [change]

    def after_the_chat_is_read(*arguments: Any, **about: Any) -> Any:
        if changes:
            changes.pop()(Chat.objects.get(pk=chat.pk))
        return add_message(*arguments, **about)

    monkeypatch.setattr(services, "add_message", after_the_chat_is_read)
    assert start(session, chat.pk, {"message": "Hello"}) == answer
    chat.refresh_from_db()
    assert chat.title == title
    assert list(chat.messages.order_by("created_at").values_list("content", flat=True)) == messages
    assert list(Run.objects.filter(chat=chat, status="queued").values_list("pk", flat=True)) == (
        [chat.active_run_id] if chat.active_run_id else []
    )


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite writes in steps, in a transaction")
@pytest.mark.django_db(transaction=True)
def test_a_start_takes_two_statements(session: Any, user: Any, django_assert_num_queries: Any) -> None:
    chats = [make_chat(user)[0].pk for _ in range(2)]
    assert start(session, chats[0], {"message": "Hello"}) == (201, "")
    with django_assert_num_queries(2):  # the chat with its user and the credits, all writes
        assert start(session, chats[1], {"message": "Hello"}) == (201, "")


@pytest.mark.django_db(transaction=True)
def test_a_schema_is_checked_before_the_transaction_of_a_key_begins(session, user, monkeypatch):
    """On SQLite, the transaction keeps all other writes waiting."""
    check, inside = schema._check, []

    def note(*args: Any) -> Any:
        inside.append(connection.in_atomic_block)
        return check(*args)

    monkeypatch.setattr(schema, "_check", note)
    body = {"message": "Hello", "outputSchema": {"type": "object"}}
    path = f"/api/v1/chats/{make_chat(user)[0].pk}/runs"
    assert session.post(path, body, format="json", HTTP_IDEMPOTENCY_KEY="a").status_code == 201
    assert inside == [False]
