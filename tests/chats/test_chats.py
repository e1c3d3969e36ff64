"""Creating, listing, renaming and deleting chats on both surfaces (docs/resources.md)."""

import re

import pytest

from chats.models import Chat
from tests import factories
from tests.chats.conftest import code, fields

pytestmark = pytest.mark.django_db
BASES = {"session": "/api/v1", "public": "/api/public/v1"}


@pytest.fixture(params=list(BASES))
def api(request, user):
    """A client and the path of its surface."""
    client = factories.session_client(user) if request.param == "session" else factories.public_client(user)
    return client, BASES[request.param]


def test_a_chat_is_created_listed_renamed_and_deleted(api):
    client, base = api
    made = client.post(f"{base}/chats", {"title": "Plans"}, format="json")
    assert made.status_code == 201
    chat = made.json()
    assert set(chat) == {"id", "title", "clientId", "activeRunId", "createdAt", "updatedAt"}
    assert re.fullmatch(r"chat_[0-9a-z]{26}", chat["id"])
    assert (chat["title"], chat["activeRunId"]) == ("Plans", None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", chat["createdAt"])
    path = f"{base}/chats/{chat['id']}"
    assert client.get(path).json() == chat

    renamed = client.patch(path, {"title": "Other plans"}, format="json")
    assert renamed.status_code == 200
    assert renamed.json()["title"] == "Other plans"
    assert renamed.json()["updatedAt"] >= chat["updatedAt"]
    assert client.get(path).json() == renamed.json()
    assert [item["id"] for item in client.get(f"{base}/chats").json()["items"]] == [chat["id"]]

    gone = client.delete(path)
    assert (gone.status_code, gone.content) == (204, b"")
    assert code(client.get(path)) == (404, "NOT_FOUND")
    assert code(client.patch(path, {"title": "x"}, format="json")) == (404, "NOT_FOUND")
    assert code(client.delete(path)) == (404, "NOT_FOUND")
    assert code(client.get(f"{path}/messages")) == (404, "NOT_FOUND")
    assert client.get(f"{base}/chats").json() == {"items": [], "nextCursor": None}
    assert Chat.objects.get(pk=chat["id"]).deleted_at is not None


@pytest.mark.parametrize("body", [{}, {"title": None}])
def test_a_title_is_optional(session, body):
    assert session.post("/api/v1/chats", body, format="json").json()["title"] is None


@pytest.mark.parametrize("title", ["x" * 200, "漢" * 200, "🦊", "a/b\\c", "\u202egnp", "<script>"])
def test_valid_titles(session, title):
    chat = session.post("/api/v1/chats", {"title": title}, format="json").json()
    assert session.get(f"/api/v1/chats/{chat['id']}").json()["title"] == title


@pytest.mark.parametrize("title", ["", "   ", "x" * 201, 5, True, ["x"], {"a": 1}])
def test_invalid_titles(session, user, title):
    chat = factories.ChatFactory(user=user, title="before")
    assert "title" in fields(session.post("/api/v1/chats", {"title": title}, format="json"))
    assert "title" in fields(session.patch(f"/api/v1/chats/{chat.pk}", {"title": title}, format="json"))
    assert Chat.objects.get().title == "before"


def test_a_rename_requires_a_title_and_accepts_null(session, user):
    chat = factories.ChatFactory(user=user, title="before")
    path = f"/api/v1/chats/{chat.pk}"
    assert "title" in fields(session.patch(path, {}, format="json"))
    assert session.patch(path, {"title": None}, format="json").json()["title"] is None


def test_the_first_message_sets_the_title_of_a_chat_without_one(session, user):
    plain, named = factories.ChatFactory(user=user, title=None), factories.ChatFactory(user=user, title="Mine")
    for chat in (plain, named):
        body = {"message": "\n  \n  Plan my trip \nand more"}
        assert session.post(f"/api/v1/chats/{chat.pk}/runs", body, format="json").status_code == 201
    assert session.get(f"/api/v1/chats/{plain.pk}").json()["title"] == "Plan my trip"
    assert session.get(f"/api/v1/chats/{named.pk}").json()["title"] == "Mine"


@pytest.mark.parametrize(
    ("message", "title"), [("word " * 40, "word " * 15 + "word…"), ("漢" * 100, "漢" * 79 + "…"), ("\n \t\n", None)]
)
def test_a_title_is_the_first_line_at_most_80_characters(session, user, message, title):
    chat = factories.ChatFactory(user=user, title=None)
    session.post(f"/api/v1/chats/{chat.pk}/runs", {"message": message}, format="json")
    assert session.get(f"/api/v1/chats/{chat.pk}").json()["title"] == title


def test_the_newest_chats_come_first_page_by_page(session, user):
    made = [factories.ChatFactory(user=user).pk for _ in range(7)]
    factories.ChatFactory()
    seen, cursor, sizes = [], "", []
    while cursor is not None:
        page = session.get(f"/api/v1/chats?limit=3{cursor and f'&cursor={cursor}'}").json()
        seen += [item["id"] for item in page["items"]]
        sizes.append(len(page["items"]))
        if len(seen) == 3:
            factories.ChatFactory(user=user)  # newer than the page, so it must not shift the next page
        cursor = page["nextCursor"]
    assert seen == made[::-1]
    assert sizes == [3, 3, 1]
