from __future__ import annotations

import pytest
from django.core.exceptions import FieldDoesNotExist
from django.db import DataError, IntegrityError, connection, transaction

from chats.models import Chat, Message
from config.database.writes import Writes, insert, update
from config.kernel import clock
from config.kernel.ids import new_id
from tests import factories

pytestmark = pytest.mark.django_db


def message(chat: Chat, role: str = "user", content: str = "") -> Message:
    now = clock.now()
    return Message(
        id=new_id("msg"),
        chat_id=chat.pk,
        run_id=new_id("run"),
        role=role,
        content=content,
        created_at=now,
        updated_at=now,
    )


@pytest.fixture
def chat() -> Chat:
    return factories.ChatFactory(title=None)


def renaming(chat: Chat, **where: object) -> Writes:
    """The chat's renaming, and two messages and a title of another chat's that go with it."""
    writes = Writes()
    writes.update(Chat, {"id": chat.pk, **where}, {"title": "New"})
    writes.insert(message(chat, content="one"), message(chat, content="two"))
    writes.update(Chat, {"id": factories.ChatFactory(user=chat.user, title="Old").pk}, {"title": "Newer"})
    return writes


def titles() -> set[str | None]:
    return set(Chat.objects.values_list("title", flat=True))


def test_all_is_written_if_the_first_finds_its_row(chat):
    with transaction.atomic():
        assert renaming(chat, title=None).do() == 1
    assert titles() == {"New", "Newer"}
    assert set(Message.objects.values_list("content", flat=True)) == {"one", "two"}


def test_nothing_is_written_if_the_first_finds_none(chat):
    called: list[str] = []
    writes = renaming(chat, title="Another")
    writes.execute("UPDATE chats_chat SET title = %s WHERE id = %s", ["Newest", chat.pk], lambda: called.append("it"))
    with transaction.atomic():
        assert writes.do() == 0
    assert titles() == {None, "Old"}
    assert not Message.objects.exists()
    assert called == []


def test_who_asked_is_told_only_of_rows_that_changed(chat):
    told: list[str] = []
    statement = "UPDATE chats_message SET content = %s WHERE chat_id = %s"
    factories.MessageFactory(chat=chat)
    also = Writes()
    also.execute(statement, ["x", chat.pk], lambda: told.append("found"))
    also.execute(statement, ["x", "chat_of_nobody"], lambda: told.append("not found"))
    writes = Writes()
    writes.update(Chat, {"id": chat.pk}, {"title": "New"})
    writes.include(also)
    writes.do()
    assert told == ["found"]


def test_a_group_is_one_statement_on_postgresql(chat, django_assert_num_queries):
    writes = renaming(chat)
    with django_assert_num_queries(1 if connection.vendor == "postgresql" else 3):
        writes.do()


def test_rows_that_were_written_know_it(chat):
    row = message(chat)
    insert(row)
    row.content = "changed"
    row.save()
    assert Message.objects.get().content == "changed"


@pytest.mark.django_db(transaction=True)
def test_one_that_is_refused_undoes_them_all(chat):
    row = message(chat)
    insert(row)
    writes = Writes()
    writes.update(Chat, {"id": chat.pk}, {"title": "New"})
    writes.insert(row)
    with pytest.raises(IntegrityError), transaction.atomic():
        writes.do()
    assert titles() == {None}


@pytest.mark.services
@pytest.mark.django_db(transaction=True)
def test_what_is_too_long_is_refused_and_not_cut(chat):
    writes = Writes()
    writes.update(Chat, {"id": chat.pk}, {"title": "New"})
    writes.insert(message(chat, role="much longer than a role may be"))
    with pytest.raises(DataError), transaction.atomic():
        writes.do()
    assert not Message.objects.exists()


def test_a_field_that_is_not_there_is_named(chat):
    with pytest.raises(FieldDoesNotExist, match="tilte"):
        update(Chat, {"id": chat.pk}, {"tilte": "x"})
