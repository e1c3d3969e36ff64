"""The baselines of hold + capture: different ways to write them in SQL.

They write to the ledger's tables, so that rows, indexes, foreign keys and totals are the same. The fastest one also
writes to copies of the tables without foreign keys and totals, which shows the cost of these.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

Connection = psycopg.Connection[tuple[int, ...]]
ESTIMATE = 1_000
COPIES = """
    CREATE TABLE plain_account (LIKE credits_account INCLUDING ALL);
    CREATE TABLE plain_entry (LIKE credits_ledgerentry INCLUDING ALL);
    INSERT INTO plain_account SELECT * FROM credits_account
"""
_numbers = itertools.count()


def next_call() -> str:
    """A new invocation id, unique across processes."""
    return f"inv_{os.getpid()}x{next(_numbers)}"


@dataclass(frozen=True)
class Plain:
    """``steps``: for the hold and the capture, the guarded UPDATE of the account and the values of the ledger row."""

    user_id: int
    account: str = "credits_account"
    entry: str = "credits_ledgerentry"

    @property
    def steps(self) -> tuple[tuple[str, str], tuple[str, str]]:
        about = f"{self.user_id}, 1000, 'draw', 'chat_1', 'run_1', %(call)s::varchar, '', now()"
        change = f"UPDATE {self.account} SET updated_at = now(), held = held"
        return (
            (
                f"{change} + 1000 WHERE user_id = {self.user_id} AND balance - held >= 1000",
                f"{about}, %(hold)s::varchar, 'HOLD', NULL, 'hold:' || %(call)s::varchar",
            ),
            (
                f"{change} - 1000, balance = balance - 1000 WHERE user_id = {self.user_id} AND held >= 1000",
                f"{about}, %(capture)s::varchar, 'CAPTURE', %(hold)s::varchar, 'settle:' || %(hold)s::varchar",
            ),
        )

    @property
    def insert(self) -> str:
        return (
            f"INSERT INTO {self.entry} (account_id, amount, tool_key, chat_id, run_id, invocation_id, reason,"
            " created_at, id, type, against_id, cause)"
        )


def _values(call: str) -> dict[str, str]:
    return {"call": call, "hold": f"led_h{call}", "capture": f"led_c{call}"}


def select_for_update(plain: Plain, connection: Connection, call: str) -> None:
    for update, row in plain.steps:
        with connection.transaction():
            look = f"SELECT balance, held FROM {plain.account} WHERE user_id = {plain.user_id} FOR UPDATE"
            connection.execute(look).fetchone()
            connection.execute(update)
            connection.execute(f"{plain.insert} VALUES ({row})", _values(call))


def update_first(plain: Plain, connection: Connection, call: str) -> None:
    for update, row in plain.steps:
        with connection.transaction():
            assert connection.execute(update).rowcount == 1
            connection.execute(f"{plain.insert} VALUES ({row})", _values(call))


def insert_first(plain: Plain, connection: Connection, call: str) -> None:
    for update, row in plain.steps:
        with connection.transaction():
            connection.execute(f"{plain.insert} VALUES ({row})", _values(call))
            assert connection.execute(update).rowcount == 1


def one_statement(plain: Plain, connection: Connection, call: str) -> None:
    for update, row in plain.steps:
        statement = f"WITH moved AS ({update} RETURNING 1) {plain.insert} SELECT {row} FROM moved"
        with connection.transaction():
            assert connection.execute(statement, _values(call)).rowcount == 1


Way = Callable[[Plain, Connection, str], None]
WAYS: dict[str, Way] = {
    "SELECT FOR UPDATE": select_for_update,
    "guarded UPDATE, then INSERT": update_first,
    "INSERT, then guarded UPDATE": insert_first,
    "one statement": one_statement,
}
