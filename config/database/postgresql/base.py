"""Django's backend for PostgreSQL, with connections that wait a limited time for each answer, and plans that survive
migrations. An error that only a new connection cures closes the connection and becomes an OperationalError.
"""

from typing import Any, TypeVar

import psycopg
from django.conf import settings
from django.db.backends.postgresql import base, operations
from django.db.backends.utils import CursorWrapper
from psycopg.abc import Params, PQGen, Query

R = TypeVar("R")
WAKE_SECONDS = 0.1

# The server reports these errors, and a new connection does not have them.
LOST_CODES = {
    "25006",  # after a failover, the connection is still to the old server, which is read-only
    "25P03",  # the process was suspended in a transaction for longer than DATABASE_IDLE_TRANSACTION_SECONDS
    "26000",  # a pooler has moved the connection to a session that has not prepared the statement,
    "42P05",  # or on which another client has prepared one of the same name
    "57P01",  # the server shuts down,
    "57P02",  # has crashed,
    "57P03",  # or is starting
}


class Connection(psycopg.Connection[Any]):
    answer_seconds: float | None = None

    def wait(self, gen: PQGen[R], interval: float = WAKE_SECONDS, timeout: float | None = None) -> R:
        """Every statement, commit and rollback waits here for the server's answer."""
        try:
            return super().wait(gen, interval, self.answer_seconds if timeout is None else timeout)
        except psycopg.Error as error:
            # psycopg's own errors have no code: no answer in time, or the end of the connection.
            unanswered = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
            if not unanswered and error.sqlstate not in LOST_CODES:
                raise
            self.close()
            raise psycopg.OperationalError(str(error)) from error


class Cursor(base.ServerBindingCursor):
    """Prepares only statements that are declared ``stable``: the types of their results never change. After a
    migration that changes them, PostgreSQL would refuse the statement on each connection that has prepared it.
    """

    stable = False

    def execute(
        self, query: Query, params: Params | None = None, *, prepare: bool | None = None, **options: Any
    ) -> Any:
        return super().execute(query, params, prepare=prepare if self.stable else False, **options)  # type: ignore[misc]


class DatabaseOperations(operations.DatabaseOperations):
    def last_executed_query(self, cursor: Any, sql: str, params: Params | None) -> str:
        return sql if isinstance(cursor, psycopg.RawCursor) else super().last_executed_query(cursor, sql, params)


class DatabaseWrapper(base.DatabaseWrapper):
    ops_class = DatabaseOperations

    def raw_cursor(self) -> CursorWrapper:
        """A cursor for ``stable`` statements with PostgreSQL's own placeholders, such as $1. psycopg parses other
        placeholders in Python, and if there are more than 50, at each execution.
        """
        self.validate_thread_sharing()
        self.close_if_health_check_failed()
        self.ensure_connection()
        with self.wrap_database_errors:
            cursor: Any = psycopg.RawCursor(self.connection)
        return self.make_debug_cursor(cursor) if self.queries_logged else self.make_cursor(cursor)

    def get_connection_params(self) -> dict[str, Any]:
        return {**super().get_connection_params(), "cursor_factory": Cursor}

    def get_new_connection(self, conn_params: dict[str, Any]) -> Connection:
        # As in the base class, which has no setting for the class of the connection.
        self.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        connection = Connection.connect(**conn_params)
        if settings.DATABASE_LIMITS_APPLY:
            connection.answer_seconds = settings.DATABASE_ANSWER_SECONDS
        return connection
