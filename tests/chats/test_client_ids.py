"""Chats that callers name themselves: ``clientId``."""

import pytest

from chats.models import Chat
from chats.services import find_chat, make_chat
from tests import factories
from tests.chats.conftest import code, fields
from tests.threads import side_by_side

CHATS = "/api/v1/chats"


def make(client, client_id, base=CHATS, **body):
    return client.post(base, {"clientId": client_id} | body, format="json")


@pytest.mark.django_db
def test_a_client_id_names_one_chat_of_its_user(session, public):
    made = make(session, "thread 1", title="First")
    again = make(public, "thread 1", "/api/public/v1/chats", title="Second")
    assert (made.status_code, again.status_code) == (201, 200)
    assert again.json() == made.json() == made.json() | {"clientId": "thread 1", "title": "First"}
    other = make(session, "thread 2")
    strangers = make(factories.session_client(factories.UserFactory()), "thread 1")
    assert (other.status_code, strangers.status_code) == (201, 201)
    assert len({made.json()["id"], other.json()["id"], strangers.json()["id"]}) == 3


@pytest.mark.django_db
def test_a_deleted_chat_gives_its_client_id_back(session):
    first = make(session, "a").json()["id"]
    session.delete(f"{CHATS}/{first}")
    second = make(session, "a")
    assert (second.status_code, second.json()["id"] != first) == (201, True)
    assert session.get(f"{CHATS}?clientId=a").json()["items"] == [second.json()]


@pytest.mark.django_db
def test_the_list_of_chats_can_be_filtered_by_client_id(session):
    made = make(session, "a&b").json()
    make(session, "c")
    session.post(CHATS, {}, format="json")
    assert session.get(CHATS, {"clientId": "a&b"}).json() == {"items": [made], "nextCursor": None}
    assert session.get(CHATS, {"clientId": "A&B"}).json()["items"] == []
    for wrong in ("", "x" * 129, "é", "a\0"):
        assert "clientId" in fields(session.get(CHATS, {"clientId": wrong}))


@pytest.mark.django_db
@pytest.mark.parametrize("value", ["", "x" * 129, "é", "a\n", "a\0", 5, ["a"], {}])
def test_an_invalid_client_id_is_refused(session, value):
    assert code(make(session, value)) == (400, "VALIDATION_ERROR")
    assert not Chat.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("value", [" ", "~" * 128, "../x?y=%00", "chat_01"])
def test_a_valid_client_id_comes_back_as_it_was_sent(session, value):
    assert make(session, value).json()["clientId"] == value


@pytest.mark.django_db
def test_a_key_that_reads_no_chats_is_not_told_the_title_of_an_existing_one(session, user):
    made = make(session, "a", title="Secret").json()
    writer = factories.public_client(user, ["chats:write"])
    assert make(writer, "a", "/api/public/v1/chats").json() == made | {"title": None}


@pytest.mark.django_db
def test_nor_by_the_replay_of_another_key_s_request(user, public):
    path, writer = "/api/public/v1/chats", factories.public_client(user, ["chats:write"])

    def ask(client, key, **body):
        return client.post(path, {"clientId": "a"} | body, format="json", HTTP_IDEMPOTENCY_KEY=key)

    made, again = ask(public, "first", title="Secret").json(), ask(public, "second").json()
    assert again == made
    replayed = ask(writer, "second")
    assert (replayed["Idempotent-Replayed"], replayed.json()) == ("true", made | {"title": None})
    # Its own title, and what a key that reads chats gets, stay.
    assert ask(writer, "first", title="Secret").json() == ask(public, "second").json() == made


@pytest.mark.django_db(transaction=True)
def test_clients_at_the_same_time_get_one_chat(user):
    clients = [factories.session_client(user) for _ in range(16)]
    answers = side_by_side(16, lambda number: make(clients[number], "a"))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1


@pytest.mark.django_db
def test_a_front_finds_a_chat_by_its_id_or_its_client_id(user):
    chat = factories.ChatFactory(user=user, client_id="a")
    theirs, gone = factories.ChatFactory(client_id="b"), factories.ChatFactory(user=user, deleted_at=chat.created_at)
    assert find_chat(user, chat.pk) == find_chat(user, "a") == make_chat(user, client_id="a")[0] == chat
    assert [find_chat(user, key) for key in ("b", theirs.pk, gone.pk, "", "é", "x" * 129)] == [None] * 6
    made = [make_chat(user, client_id=key)[0] for key in ("b", theirs.pk)]
    assert [(row.user, row.client_id) for row in made] == [(user, "b"), (user, theirs.pk)]
