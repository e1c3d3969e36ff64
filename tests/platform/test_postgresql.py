"""The backend for PostgreSQL: which errors end a connection, and how long it waits for an answer."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, transaction

from config.api.authentication import user_named
from tests import factories

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite's connections are files"),
]
OFTEN = 8  # psycopg prepares a statement from its fifth execution


@pytest.fixture(autouse=True)
def new_connection():
    factories.UserFactory(username="ada")
    connection.close()
    yield
    connection.close()


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


def test_an_answer_that_takes_too_long_ends_the_connection():
    connection.ensure_connection()
    execute("SET statement_timeout = 0")
    connection.connection.answer_seconds = 0.2
    with pytest.raises(OperationalError), transaction.atomic():
        execute("SELECT pg_sleep(2)")
    execute("SELECT 1")
