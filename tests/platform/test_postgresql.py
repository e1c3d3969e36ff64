"""The backend for PostgreSQL: which errors end a connection, and how long it waits for an answer."""

from urllib.parse import urlsplit

import psycopg
import pytest
from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import OperationalError, connection, transaction

from config.api.authentication import user_named
from config.kernel.ids import IdField, RefField
from tests import factories
from tests.stack.pgbouncer import BINARY, MISSING, pgbouncer

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite's connections are files"),
]
OFTEN = 8  # psycopg prepares a statement from its fifth execution


@pytest.fixture(autouse=True)
def new_connection():
    factories.UserFactory(username="ada")
    connection.close()
    settings = dict(connection.settings_dict)
    yield
    connection.close()
    connection.settings_dict |= settings


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def pid() -> int:
    connection.ensure_connection()
    return connection.connection.info.backend_pid


def test_a_session_that_became_read_only_is_replaced():
    execute("SET default_transaction_read_only = on")
    first = pid()
    with pytest.raises(OperationalError):
        factories.UserFactory()
    connection.close_if_unusable_or_obsolete()
    factories.UserFactory()
    assert pid() != first


def test_a_statement_that_the_session_has_not_prepared_is_read_again():
    for _ in range(OFTEN):
        user_named.first("ada")
    connection.connection.pgconn.exec_(b"DEALLOCATE ALL")  # psycopg does not notice
    assert user_named.first("ada").username == "ada"


@pytest.mark.services
@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_a_pooler_that_changes_the_session_or_the_plan_is_not_noticed():
    """PgBouncer in transaction mode, although the settings say that there is none: statements are prepared."""
    name = connection.settings_dict["NAME"]
    with pgbouncer(2, ignore_startup_parameters="options") as url, psycopg.connect(f"{url}/{name}") as other:
        address = urlsplit(url)
        connection.settings_dict |= {"HOST": address.hostname, "PORT": address.port, "USER": address.username}
        for _ in range(OFTEN):
            user_named.first("ada")
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            prepared = cursor.fetchone()
        # The transaction of another client has that session now, so that the next statement reaches a new one.
        assert other.execute("SELECT pg_backend_pid()").fetchone() == prepared
        lost = connection.connection
        assert user_named.first("ada").username == "ada"
        assert lost.closed, "the session had not prepared the statement (26000)"
        other.rollback()
        for _ in range(OFTEN):
            user_named.first("ada")
        length = get_user_model()._meta.get_field("username").max_length
        for changed in (length + 10, length):
            other.execute(f"ALTER TABLE auth_user ALTER username TYPE varchar({changed})")
            other.commit()
            assert user_named.first("ada").username == "ada"
        connection.close()


def test_an_answer_that_takes_too_long_ends_the_connection():
    connection.ensure_connection()
    execute("SET statement_timeout = 0")
    connection.connection.answer_seconds = 0.2
    with pytest.raises(OperationalError), transaction.atomic():
        execute("SELECT pg_sleep(2)")
    execute("SELECT 1")


def test_a_column_of_ids_has_no_index_for_like():
    """Django makes one for each text with an index of its own, and each new row would write an entry."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tablename, indexdef FROM pg_indexes WHERE indexdef LIKE '%%_pattern_ops%%'", [])
        found = {(table, definition.rpartition("(")[2].split()[0]) for table, definition in cursor.fetchall()}
    ids = {
        (model._meta.db_table, field.column)
        for model in apps.get_models()
        for field in model._meta.local_concrete_fields
        if isinstance(field.target_field if field.is_relation else field, IdField | RefField)
    }
    assert ("runs_run", "id") in ids
    assert not found & ids
