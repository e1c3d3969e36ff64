import pytest
from django.core.exceptions import FieldDoesNotExist
from django.db import DataError, IntegrityError, connection, transaction

from chats.models import Chat, Message
from config.database import writes as statements
from config.database.writes import Writes
from config.kernel import clock
from config.kernel.ids import new_id
from runs.models import Run
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
    """Return writes that rename the chat and, if it was found, add two messages and rename another chat."""
    writes = Writes()
    writes.update(Chat, {"id": chat.pk, **where}, {"title": "New"})
    writes.insert(message(chat, content="one"), message(chat, content="two"))
    writes.update(Chat, {"id": factories.ChatFactory(user=chat.user, title="Old").pk}, {"title": "Newer"})
    return writes


def titles() -> set[str | None]:
    return set(Chat.objects.values_list("title", flat=True))


def test_everything_is_written_if_the_first_update_finds_its_row(chat):
    with transaction.atomic():
        assert renaming(chat, title=None).do() == 1
    assert titles() == {"New", "Newer"}
    assert set(Message.objects.values_list("content", flat=True)) == {"one", "two"}


def test_nothing_is_written_if_the_first_update_finds_no_row(chat):
    called: list[str] = []
    writes = renaming(chat, title="Another")
    writes.execute("UPDATE chats_chat SET title = %s WHERE id = %s", ["Newest", chat.pk], lambda: called.append("it"))
    with transaction.atomic():
        assert writes.do() == 0
    assert titles() == {None, "Old"}
    assert not Message.objects.exists()
    assert called == []


def test_a_callback_runs_only_if_its_statement_changed_a_row(chat):
    reached: list[str] = []
    statement = "UPDATE chats_message SET content = %s WHERE chat_id = %s"
    factories.MessageFactory(chat=chat)
    also = Writes()
    also.execute(statement, ["x", chat.pk], lambda: reached.append("found"))
    also.execute(statement, ["x", "chat_of_nobody"], lambda: reached.append("not found"))
    writes = Writes()
    writes.update(Chat, {"id": chat.pk}, {"title": "New"})
    writes.include(also)
    writes.do()
    assert reached == ["found"]


def test_a_group_is_one_statement_on_postgresql(chat, django_assert_num_queries):
    writes = renaming(chat)
    with django_assert_num_queries(1 if connection.vendor == "postgresql" else 3):
        writes.do()


def test_an_insert_writes_none_over_the_default_of_the_database(chat):
    now = clock.now()
    run = factories.RunFactory.build(id=new_id("run"), chat=chat, user=chat.user, due_at=None)
    run.created_at = run.updated_at = now
    Writes().insert(run).do()
    stored = Run.objects.get(pk=run.pk)
    assert [stored.due_at, stored.error_code, stored.created_at] == [None, None, now]


def test_an_inserted_row_can_be_saved_again(chat):
    row = message(chat)
    Writes().insert(row).do()
    row.content = "changed"
    row.save()
    assert Message.objects.get().content == "changed"


@pytest.mark.django_db(transaction=True)
def test_a_failed_write_rolls_all_writes_back(chat):
    row = message(chat)
    Writes().insert(row).do()
    writes = Writes()
    writes.update(Chat, {"id": chat.pk}, {"title": "New"})
    writes.insert(row)
    with pytest.raises(IntegrityError), transaction.atomic():
        writes.do()
    assert titles() == {None}


@pytest.mark.services
@pytest.mark.django_db(transaction=True)
def test_a_value_that_is_too_long_is_an_error_and_is_not_cut(chat):
    writes = Writes()
    writes.update(Chat, {"id": chat.pk}, {"title": "New"})
    writes.insert(message(chat, role="much longer than a role may be"))
    with pytest.raises(DataError), transaction.atomic():
        writes.do()
    assert not Message.objects.exists()


def test_an_unknown_field_is_named_in_the_error(chat):
    with pytest.raises(FieldDoesNotExist, match="tilte"):
        Writes().update(Chat, {"id": chat.pk}, {"tilte": "x"})


def test_the_compiled_statements_are_bounded(chat):
    for number in range(statements.STATEMENTS_MAX + 10):
        writes = Writes()
        writes.execute(f"UPDATE chats_chat SET title = %s WHERE id = 'chat_{number}'", ["New"])
        writes.insert(message(chat))
        assert writes.do() == 0
    for compiled in (statements._insert, statements._numbered):
        assert compiled.cache_info().currsize <= statements.STATEMENTS_MAX
