"""The baselines of hold + capture: the four plain ways of writing them in SQL, on a copy of the ledger's tables.

The copy has the ledger's columns, checks and indexes, but no triggers: what the usage totals cost is in the ratio.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import psycopg

Connection = psycopg.Connection[tuple[int, ...]]
Pair = Callable[[Connection, str], None]
ESTIMATE = 1_000
_numbers = itertools.count()

SCHEMA = """
    DROP TABLE IF EXISTS plain_entry, plain_account;
    CREATE TABLE plain_account (LIKE credits_account INCLUDING ALL);
    CREATE TABLE plain_entry (LIKE credits_ledgerentry INCLUDING ALL);
    INSERT INTO plain_account (user_id, balance, held) VALUES (1, 1000000000000000, 0)
"""
INSERT = """INSERT INTO plain_entry
    (id, account_id, type, amount, tool_key, chat_id, run_id, invocation_id, against_id, cause, reason, created_at)"""
ABOUT = "'draw', 'chat_1', 'run_1', %(call)s::varchar"
HOLD_ROW = f"%(hold)s::varchar, 1, 'HOLD', 1000, {ABOUT}, NULL, 'hold:' || %(call)s::varchar, '', now()"
CAPTURE_ROW = (
    f"%(capture)s::varchar, 1, 'CAPTURE', 1000, {ABOUT}, %(hold)s::varchar, 'settle:' || %(hold)s::varchar, '', now()"
)
GUARDED_HOLD = """UPDATE plain_account SET held = held + 1000, updated_at = now()
    WHERE user_id = 1 AND balance - held >= 1000"""
GUARDED_CAPTURE = """UPDATE plain_account SET balance = balance - 1000, held = held - 1000, updated_at = now()
    WHERE user_id = 1 AND held >= 1000"""


def _values(call: str) -> dict[str, str]:
    return {"call": call, "hold": f"led_h{call}", "capture": f"led_c{call}"}


def select_for_update(connection: Connection, call: str) -> None:
    for step, row in (("held = held + 1000", HOLD_ROW), ("balance = balance - 1000, held = held - 1000", CAPTURE_ROW)):
        with connection.transaction():
            connection.execute("SELECT balance, held FROM plain_account WHERE user_id = 1 FOR UPDATE").fetchone()
            connection.execute(f"UPDATE plain_account SET {step}, updated_at = now() WHERE user_id = 1")
            connection.execute(f"{INSERT} VALUES ({row})", _values(call))


def update_first(connection: Connection, call: str) -> None:
    for update, row in ((GUARDED_HOLD, HOLD_ROW), (GUARDED_CAPTURE, CAPTURE_ROW)):
        with connection.transaction():
            assert connection.execute(update).rowcount == 1
            connection.execute(f"{INSERT} VALUES ({row})", _values(call))


def insert_first(connection: Connection, call: str) -> None:
    for update, row in ((GUARDED_HOLD, HOLD_ROW), (GUARDED_CAPTURE, CAPTURE_ROW)):
        with connection.transaction():
            connection.execute(f"{INSERT} VALUES ({row})", _values(call))
            assert connection.execute(update).rowcount == 1


def one_statement(connection: Connection, call: str) -> None:
    for update, row in ((GUARDED_HOLD, HOLD_ROW), (GUARDED_CAPTURE, CAPTURE_ROW)):
        statement = f"WITH moved AS ({update} RETURNING 1) {INSERT} SELECT {row} FROM moved"
        assert connection.execute(statement, _values(call)).rowcount == 1


WAYS: dict[str, Pair] = {
    "SELECT FOR UPDATE": select_for_update,
    "guarded UPDATE, then INSERT": update_first,
    "INSERT, then guarded UPDATE": insert_first,
    "one statement": one_statement,
}


def next_call() -> str:
    """An invocation's id, new to every process."""
    return f"inv_{os.getpid()}x{next(_numbers)}"
