"""Attachments in messages: which ones a message may use, and what a deleted chat hides."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from chats.models import Attachment, Message
from runs.models import Run
from tests import factories
from tests.chats.conftest import code, fields, ready
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db


@pytest.fixture
def chat(user):
    return factories.ChatFactory(user=user)


def start(client, chat, attachments, base="/api/v1", **body):
    body = {"message": "Look", "attachmentIds": attachments, "onActiveRun": "enqueue"} | body
    return client.post(f"{base}/chats/{chat.pk}/runs", body, format="json")


def test_a_message_uses_attachments_in_the_order_given(session, public, user, chat):
    ids = [ready(session, fileName=f"{name}.txt")["id"] for name in "abc"]
    chosen = [ids[2], ids[0], ids[1]]
    run = start(session, chat, chosen)
    assert run.status_code == 201, run.content
    (message,) = session.get(f"/api/v1/chats/{chat.pk}/messages").json()["items"]
    assert message["id"] == run.json()["userMessageId"]
    assert [item["id"] for item in message["attachments"]] == chosen
    assert {item["status"] for item in message["attachments"]} == {"READY"}
    more = ready(session)["id"]
    assert start(public, chat, [more], "/api/public/v1").status_code == 201


@pytest.mark.parametrize("value", [[], None])
def test_attachments_are_optional(session, chat, value):
    assert start(session, chat, value).status_code == 201


def test_each_unusable_attachment_is_named(session, user, chat):
    good = factories.AttachmentFactory(user=user)
    used = factories.AttachmentFactory(user=user, message=factories.MessageFactory(chat=chat))
    hidden = factories.AttachmentFactory(user=user, message=factories.MessageFactory(chat__user=user))
    session.delete(f"/api/v1/chats/{hidden.message.chat_id}")
    pending = factories.AttachmentFactory(user=user, status="PENDING")
    expired = factories.AttachmentFactory(user=user, status="EXPIRED", stored_name="")
    theirs = factories.AttachmentFactory()
    asked = [good.pk, used.pk, hidden.pk, pending.pk, expired.pk, theirs.pk, "att_x", good.pk, "x" * 1000, "é"]
    before = (Run.objects.count(), Message.objects.count())
    problems = fields(start(session, chat, asked))
    assert {path: messages[0] for path, messages in problems.items()} == {
        "attachmentIds.1": "The attachment was used already.",
        "attachmentIds.2": "The attachment was used already.",
        "attachmentIds.3": "The attachment is not complete.",
        "attachmentIds.4": "The attachment has expired.",
        "attachmentIds.5": "There is no such attachment.",
        "attachmentIds.6": "There is no such attachment.",
        "attachmentIds.7": "The attachment is named twice.",
        "attachmentIds.8": "There is no such attachment.",
        "attachmentIds.9": "There is no such attachment.",
    }
    assert (Run.objects.count(), Message.objects.count()) == before
    good.refresh_from_db()
    assert good.message_id is None
    assert start(session, chat, [good.pk]).status_code == 201


@pytest.mark.parametrize("value", ["att_x", 5, {"a": 1}, [5], [None], [["a"]], [""]])
def test_a_value_that_is_not_a_list_of_ids_is_400(session, chat, value):
    assert any(path.startswith("attachmentIds") for path in fields(start(session, chat, value)))


def test_the_number_of_attachments_is_limited(session, user, chat):
    ids = [factories.AttachmentFactory(user=user).pk for _ in range(11)]
    assert fields(start(session, chat, ids)) == {"attachmentIds": ["Ensure this field has no more than 10 elements."]}
    assert start(session, chat, ids[:10]).status_code == 201


def test_a_refused_run_uses_no_attachment(session, user, chat):
    row = factories.AttachmentFactory(user=user)
    assert start(session, chat, []).status_code == 201
    refused = start(session, chat, [row.pk], onActiveRun="reject")
    assert code(refused) == (409, "RUN_IN_PROGRESS")
    assert "model" in fields(start(session, chat, [row.pk], model="none"))
    row.refresh_from_db()
    assert row.message_id is None


def test_deleting_a_chat_hides_its_attachments_immediately(session, chat):
    used, unused = ready(session)["id"], ready(session)["id"]
    start(session, chat, [used])
    assert session.get(f"/api/v1/attachments/{used}").status_code == 200
    session.delete(f"/api/v1/chats/{chat.pk}")
    for path in ("", "/content"):
        assert code(session.get(f"/api/v1/attachments/{used}{path}")) == (404, "NOT_FOUND")
    assert code(session.post(f"/api/v1/attachments/{used}/complete")) == (404, "NOT_FOUND")
    assert session.get(f"/api/v1/attachments/{unused}").status_code == 200


@pytest.mark.django_db(transaction=True)
def test_only_one_of_many_concurrent_messages_uses_an_attachment():
    user = factories.UserFactory()
    client = factories.session_client(user)
    chats = [client.post("/api/v1/chats", {}, format="json").json()["id"] for _ in range(4)]
    first, second = (factories.AttachmentFactory(user=user).pk for _ in "ab")

    def send(number):
        body = {"message": "Look", "attachmentIds": [first, second] if number % 2 else [second, first], "model": "demo"}
        return factories.session_client(user).post(f"/api/v1/chats/{chats[number]}/runs", body, format="json")

    answers = side_by_side(4, send)
    assert sorted(answer.status_code for answer in answers) == [201, 400, 400, 400], [a.content for a in answers]
    assert len(set(Attachment.objects.values_list("message_id", flat=True))) == 1


def test_a_run_with_attachments_makes_few_more_queries(session, user, chat):
    ids = [factories.AttachmentFactory(user=user).pk for _ in range(8)]
    start(session, chat, [])
    with CaptureQueriesContext(connection) as without:
        start(session, chat, [])
    for chosen in (ids[:1], ids[1:]):
        with CaptureQueriesContext(connection) as queries:
            start(session, chat, chosen)
        # On PostgreSQL also a begin, the chat with its lock, and a commit: only attachments need a transaction.
        assert len(queries) - len(without) == (2 if connection.vendor == "sqlite" else 5)
