"""The messages of a chat: oldest first, in pages, with their attachments (docs/resources.md)."""

import pytest

from tests import factories
from tests.chats.conftest import code

pytestmark = pytest.mark.django_db


def listing(client, chat, query="", base="/api/v1"):
    answer = client.get(f"{base}/chats/{chat.pk}/messages{query}")
    assert answer.status_code == 200, answer.content
    return answer.json()


def test_a_message_shows_its_run_and_its_attachments(session, public, user):
    message = factories.MessageFactory(chat__user=user, content="Look: 🦊")
    attachments = [factories.AttachmentFactory(user=user, message=message, position=place) for place in (1, 0)]
    (shown,) = listing(session, message.chat)["items"]
    assert set(shown) == {
        "id", "chatId", "runId", "role", "content", "attachments", "createdAt", "updatedAt"
    }  # fmt: skip
    assert (shown["id"], shown["chatId"], shown["runId"]) == (message.pk, message.chat_id, message.run_id)
    assert (shown["role"], shown["content"]) == ("user", "Look: 🦊")
    assert [item["id"] for item in shown["attachments"]] == [attachments[1].pk, attachments[0].pk]
    assert shown["attachments"][0] == session.get(f"/api/v1/attachments/{attachments[1].pk}").json()
    assert listing(public, message.chat, base="/api/public/v1")["items"] == [shown]


def test_the_oldest_come_first_page_by_page(session, user):
    chat = factories.ChatFactory(user=user)
    made = [factories.MessageFactory(chat=chat, role=role).pk for role in ("user", "assistant") * 3]
    factories.MessageFactory(chat__user=user)
    first = listing(session, chat, "?limit=4")
    later = factories.MessageFactory(chat=chat).pk
    rest = listing(session, chat, f"?limit=4&cursor={first['nextCursor']}")
    assert [item["id"] for item in first["items"] + rest["items"]] == [*made, later]
    assert [item["role"] for item in first["items"]] == ["user", "assistant", "user", "assistant"]
    assert rest["nextCursor"] is None


def test_the_newest_come_first_if_asked_for(session, public, user):
    chat = factories.ChatFactory(user=user)
    made = [factories.MessageFactory(chat=chat).pk for _ in range(5)]
    first = listing(session, chat, "?order=desc&limit=3")
    rest = listing(public, chat, f"?order=desc&limit=3&cursor={first['nextCursor']}", base="/api/public/v1")
    assert [item["id"] for item in first["items"] + rest["items"]] == made[::-1]
    assert rest["nextCursor"] is None
    assert [item["id"] for item in listing(session, chat, "?order=asc")["items"]] == made


def test_only_the_messages_of_a_run(session, user):
    chat = factories.ChatFactory(user=user)
    run = factories.RunFactory(chat=chat)
    elsewhere = factories.MessageFactory(chat__user=user)
    made = [factories.MessageFactory(chat=chat, run_id=run.pk, role=role).pk for role in ("user", "assistant")]
    factories.MessageFactory(chat=chat)
    assert [item["id"] for item in listing(session, chat, f"?runId={run.pk}")["items"]] == made
    assert [item["id"] for item in listing(session, chat, f"?runId={run.pk}&order=desc")["items"]] == made[::-1]
    for other in (elsewhere.run_id, "run_none", "", "%00", "x" * 10_000):
        assert listing(session, chat, f"?runId={other}")["items"] == []


def test_one_message(session, public, user):
    message = factories.MessageFactory(chat__user=user, role="assistant", content="Look: 🦊")
    factories.AttachmentFactory(user=user, message=message)
    (listed,) = listing(session, message.chat)["items"]
    assert session.get(f"/api/v1/messages/{message.pk}").json() == listed
    assert public.get(f"/api/public/v1/messages/{message.pk}").json() == listed
    assert session.delete(f"/api/v1/chats/{message.chat_id}").status_code == 204
    assert code(session.get(f"/api/v1/messages/{message.pk}")) == (404, "NOT_FOUND")


def test_an_empty_chat(session, user):
    assert listing(session, factories.ChatFactory(user=user)) == {"items": [], "nextCursor": None}


@pytest.mark.parametrize("query", ["?limit=0", "?limit=101", "?cursor=abc", "?order=", "?order=new"])
def test_invalid_page_parameters_are_400(session, user, query):
    chat = factories.ChatFactory(user=user)
    assert code(session.get(f"/api/v1/chats/{chat.pk}/messages{query}")) == (400, "VALIDATION_ERROR")


def test_the_number_of_queries_does_not_grow(session, user, django_assert_num_queries):
    chat = factories.ChatFactory(user=user)
    session.get("/api/v1/me")
    for _ in range(2):
        for _ in range(10):
            factories.AttachmentFactory(user=user, message=factories.MessageFactory(chat=chat))
        with django_assert_num_queries(4):
            listing(session, chat, "?limit=100")
