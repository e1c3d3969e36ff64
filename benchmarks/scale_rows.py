"""Copies of one real run with its chat, in every table that has rows of it: a large database in minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.harness import Connection, wait_until
from benchmarks.sides import Service

# The characters of each id that every copy replaces by its number. Those before them are the time, and ids of the same
# millisecond differ in the last ones.
DIGITS = 8
MARK = "#" * DIGITS
ID = f"([a-z]+_[0-9a-z]{{10}})[0-9a-z]{{{DIGITS}}}([0-9a-z]{{8}})"
# The copies follow the original at this distance, so that their times are past when they are written.
APART = "10 microseconds"
TEXTS = ("text", "character varying", "jsonb")
USERS = ("user_id", "account_id")
# The ledger takes the longest, so it comes first.
TABLES = """
    SELECT class.relname, array_agg(attname::text) FROM pg_class class JOIN pg_attribute ON attrelid = class.oid
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
      AND (attname IN ('run_id', 'chat_id') OR relname = 'chats_chat' AND attname = 'id')
    GROUP BY class.relname ORDER BY class.relname = 'credits_ledgerentry' DESC, class.relname
"""
COLUMNS = """
    SELECT column_name, data_type FROM information_schema.columns
    WHERE table_schema = 'public' AND table_name = %s AND is_identity = 'NO' AND is_generated = 'NEVER'
    ORDER BY ordinal_position
"""
# What the ledger's triggers and functions would have made of the rows.
BALANCES = """
    UPDATE credits_account account SET balance = booked.balance, held = booked.held FROM (
        SELECT account_id,
               sum(CASE WHEN type IN ('CAPTURE', 'USAGE', 'EXPIRY') THEN -amount
                        WHEN type IN ('GRANT', 'REFUND', 'ADJUSTMENT') THEN amount ELSE 0 END) AS balance,
               sum(CASE WHEN type = 'HOLD' THEN amount
                        WHEN type IN ('CAPTURE', 'USAGE', 'RELEASE') THEN -amount ELSE 0 END) AS held
        FROM credits_ledgerentry GROUP BY account_id
    ) booked WHERE user_id = booked.account_id
"""
DAYS = """
    DELETE FROM credits_daytotal;
    INSERT INTO credits_daytotal (account_id, day, tool_key, amount, records, latest)
    SELECT account_id, (latest AT TIME ZONE 'UTC')::date, tool_key, sum(amount), sum(records), max(latest)
    FROM credits_runtotal GROUP BY 1, 2, 3
"""


def connect(side: Service) -> psycopg.Connection[Any]:
    return psycopg.connect(side.stack.environment["DATABASE_URL"], autocommit=True)


def users_of(connection: psycopg.Connection[Any]) -> list[int]:
    """The ids of the users, in the order of ``Service.tokens``."""
    return [user_id for (user_id,) in connection.execute("SELECT id FROM auth_user ORDER BY id")]


def real_run(side: Service, message: str, status: str) -> str:
    """Start a run and wait until it has the status. Returns its id."""
    http = Connection(side.port)
    run = side.start_message(http, side.chat(http, 0), message)
    wait_until(lambda: http.json("GET", run.path, token=run.token)["status"] == status, 30)
    return run.path.rpartition("/")[2]


def copy_run(side: Service, run_id: str, count: int) -> dict[str, int]:
    """Write ``count`` copies of the run and its chat, which belong to the users in turns. Returns the number of new
    rows of each table.
    """
    url = side.stack.environment["DATABASE_URL"]
    with connect(side) as connection:
        users = users_of(connection)
        row = connection.execute("SELECT chat_id FROM runs_run WHERE id = %s", (run_id,)).fetchone()
        assert row is not None
        tables = connection.execute(TABLES).fetchall()
        with without_waiting_for_the_disk(connection):
            copy = partial(copy_rows, url, {"run_id": run_id, "chat_id": row[0]}, count, users)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = dict(zip((name for name, _ in tables), pool.map(copy, *zip(*tables, strict=True)), strict=True))
            connection.execute(BALANCES)
            connection.execute(DAYS)
            connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")
    os.sync()
    return {name: rows for name, rows in made.items() if rows}


@contextmanager
def without_waiting_for_the_disk(connection: psycopg.Connection[Any]) -> Iterator[None]:
    for setting in ("fsync = off", "full_page_writes = off", "max_wal_size = '4GB'"):
        connection.execute(sql.SQL("ALTER SYSTEM SET ") + sql.SQL(setting))  # type: ignore[arg-type]
    connection.execute("SELECT pg_reload_conf()")
    yield
    connection.execute("ALTER SYSTEM RESET ALL")
    connection.execute("SELECT pg_reload_conf()")


def copy_rows(
    url: str, ids: dict[str, str], count: int, users: Sequence[int], table: str, references: Sequence[str]
) -> int:
    """Copy the rows of one table that belong to the run, or to its chat."""
    column = "run_id" if "run_id" in references else references[0]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        name = sql.Identifier(table)
        made = sql.SQL("CREATE TEMP TABLE original AS SELECT * FROM {} WHERE {} = {}").format(
            name, sql.Identifier(column), sql.Literal(ids.get(column, ids["chat_id"]))
        )
        if not connection.execute(made).rowcount:
            return 0
        columns = connection.execute(COLUMNS, (table,)).fetchall()
        values = [value(connection, column, kind, users) for column, kind in columns]
        # Each copy is written as a whole, as runs are: OFFSET keeps PostgreSQL from copying row by row.
        statement = sql.SQL(
            "INSERT INTO {} ({}) SELECT {} FROM generate_series(1, {}) n, LATERAL (SELECT * FROM original OFFSET n * 0)"
            " original"
        ).format(
            name,
            sql.SQL(", ").join(sql.Identifier(column) for column, _ in columns),
            sql.SQL(", ").join(values),
            sql.Literal(count),
        )
        return connection.execute(statement).rowcount


def value(connection: psycopg.Connection[Any], column: str, kind: str, users: Sequence[int]) -> sql.Composable:
    """The column of the copy ``n``. Marks the ids in the column of the original."""
    name = sql.Identifier("original", column)
    if column in USERS:
        return sql.SQL("({}::int[])[1 + n % {}]").format(sql.Literal(list(users)), sql.Literal(len(users)))
    if kind == "timestamp with time zone":
        return sql.SQL("{} + n * {}::interval").format(name, sql.Literal(APART))
    if kind not in TEXTS:
        return name
    marked = sql.SQL("UPDATE original SET {} = regexp_replace({}::text, {}, {}, 'g')::{} WHERE {}::text ~ {}").format(
        sql.Identifier(column),
        name,
        sql.Literal(ID),
        sql.Literal(rf"\1{MARK}\2"),
        sql.SQL(kind),  # type: ignore[arg-type]
        name,
        sql.Literal(ID),
    )
    if not connection.execute(marked).rowcount:
        return name
    number = sql.SQL("lpad(n::text, {}, '0')").format(sql.Literal(DIGITS))
    return sql.SQL("replace({}::text, {}, {})::{}").format(name, sql.Literal(MARK), number, sql.SQL(kind))  # type: ignore[arg-type]
