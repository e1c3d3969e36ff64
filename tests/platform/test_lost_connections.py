"""A database connection that is lost outside of a transaction is replaced by the next compiled read."""

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from config.api.authentication import user_named
from config.database import queries
from tests import factories

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite's connections are files"),
]


@pytest.fixture
def next_request():
    """Leave the connection in the state that the second request on a connection finds."""
    factories.UserFactory(username="ada")
    connection.close()
    connection.ensure_connection()
    connection.close_if_unusable_or_obsolete()
    assert connection.health_check_enabled
    assert not connection.health_check_done
    yield
    connection.close()


def cut() -> None:
    options = connection.get_connection_params()
    names = ("host", "port", "user", "password", "dbname")
    with psycopg.connect(**{name: options[name] for name in names if name in options}, autocommit=True) as other:
        pid = connection.connection.info.backend_pid
        assert other.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,)).fetchone() == (True,)


def test_a_lost_connection_is_replaced(next_request):
    cut()
    assert user_named.first("ada").username == "ada"
    assert user_named.first("ada").username == "ada"


def test_a_working_connection_is_not_checked_beforehand(next_request, monkeypatch):
    monkeypatch.setattr(connection, "is_usable", lambda: pytest.fail("a round trip for nothing"))
    assert user_named.first("ada").username == "ada"
    connection.cursor().close()


def test_a_connection_lost_in_a_transaction_is_an_error(next_request):
    @transaction.atomic
    def read_twice():
        user_named.first("ada")
        cut()
        user_named.first("ada")

    with pytest.raises(OperationalError):
        read_twice()


def test_a_connection_lost_between_two_reads_is_replaced(next_request):
    user_named.first("ada")
    cut()
    assert user_named.first("ada").username == "ada"


def test_an_error_on_a_working_connection_is_not_retried(next_request, monkeypatch):
    reads = []

    def refuse(*args):
        reads.append(args)
        raise OperationalError("canceling statement due to statement timeout")

    monkeypatch.setattr(queries, "_fetch", refuse)
    with pytest.raises(OperationalError):
        user_named.first("ada")
    assert len(reads) == 1
