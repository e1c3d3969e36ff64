"""One movement: ledger rows and the account's change that they explain, together or not at all.

For the ledger's own modules alone. How long an account stays locked bounds what one busy user can do, and the number of
round trips decides it: PostgreSQL therefore does a whole movement in one prepared statement, and outside a transaction
of the caller's that statement is the transaction, so that nobody waits for a commit to arrive either. SQLite has one
writer at a time, so plain statements do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import psycopg
from django.db import IntegrityError, connection, transaction
from django.db.models import F
from psycopg.types.numeric import Int8

from config.api import clock
from config.api.ids import new_id
from credits.models import BALANCE_LIMIT, Account, EntryType, LedgerEntry


class Outcome(Enum):
    MOVED = "moved"
    REPEATED = "repeated"  # a row with this cause is there already
    REFUSED = "refused"  # the account is missing, or its numbers don't allow it


class Settlement(NamedTuple):
    """``held`` is the hold's amount, ``captured`` what of it was spent just now."""

    outcome: Outcome
    held: int = 0
    captured: int = 0
    tool_key: str | None = None


def post(row: LedgerEntry, *, balance: int = 0, held: int = 0, covered: bool = False) -> Outcome:
    """Insert ``row`` and add ``balance`` and ``held`` to its account, once for the row's cause.

    ``covered``: only if available stays at or above zero. Nothing is changed unless the outcome is MOVED.
    """
    if connection.vendor == "postgresql":
        return _post_at_once(row, balance, held, covered)
    # Without a savepoint: a refusal has written nothing that would have to be undone.
    with transaction.atomic(savepoint=False):
        return _post_in_steps([row], balance, held, covered)


def settle(hold_cause: str, amount: int) -> Settlement | None:
    """Capture ``amount`` of a hold, or all of it if that is less, and release the rest. None if there is no such hold.

    The first settlement of a hold wins: another is REPEATED and moves nothing.
    """
    if connection.vendor == "postgresql":
        return _settle_at_once(hold_cause, amount)
    with transaction.atomic(savepoint=False):
        return _settle_in_steps(hold_cause, amount)


def is_recorded(cause: str) -> bool:
    return LedgerEntry.objects.filter(cause=cause).exists()


# --- SQLite ----------------------------------------------------------------------------------------------------------
def _post_in_steps(rows: Sequence[LedgerEntry], balance: int, held: int, covered: bool) -> Outcome:
    if is_recorded(rows[0].cause):
        return Outcome.REPEATED
    account = Account.objects.filter(
        pk=rows[0].account_id,
        held__gte=-held,
        balance__range=(-BALANCE_LIMIT - balance, BALANCE_LIMIT - balance),
    )
    if covered:
        account = account.filter(balance__gte=F("held") + held - balance)
    if not account.update(balance=F("balance") + balance, held=F("held") + held, updated_at=rows[0].created_at):
        return Outcome.REFUSED
    LedgerEntry.objects.bulk_create(rows)
    return Outcome.MOVED


def _settle_in_steps(hold_cause: str, amount: int) -> Settlement | None:
    hold = LedgerEntry.objects.filter(cause=hold_cause).first()
    if hold is None:
        return None
    captured = min(amount, hold.amount)
    now = clock.now()
    parts = [(EntryType.CAPTURE, captured, hold.price), (EntryType.RELEASE, hold.amount - captured, None)]
    rows = [
        LedgerEntry(
            type=type,
            amount=part,
            cause=f"settle:{hold.id}",
            account_id=hold.account_id,
            against=hold,
            tool_key=hold.tool_key,
            chat_id=hold.chat_id,
            run_id=hold.run_id,
            invocation_id=hold.invocation_id,
            price=price,
            created_at=now,
        )
        for type, part, price in parts
        if part
    ]
    for rest in rows[1:]:
        rest.cause += ":rest"
    outcome = _post_in_steps(rows, -captured, -hold.amount, covered=False)
    return Settlement(outcome, hold.amount, captured if outcome is Outcome.MOVED else 0, hold.tool_key)


# --- PostgreSQL ------------------------------------------------------------------------------------------------------
def _post_at_once(row: LedgerEntry, balance: int, held: int, covered: bool) -> Outcome:
    values = {column: value for column, attribute in _columns() if (value := getattr(row, attribute)) is not None}
    if row.price is not None:
        values["price"] = json.dumps(row.price)
    values["amount"] = Int8(row.amount)
    own = not connection.in_atomic_block
    statement = _post_statement(tuple(values), covered, own)
    parameters = values | {"change": Int8(balance), "change_held": Int8(held), "limit": Int8(BALANCE_LIMIT)}
    with suppress(_Repeated):
        moved, recorded = _row(statement, parameters, own)
        if recorded:
            return Outcome.MOVED
        if not moved:
            return Outcome.REPEATED if is_recorded(row.cause) else Outcome.REFUSED
        _take_back(row.account_id, balance, held)
    return Outcome.REPEATED


def _settle_at_once(hold_cause: str, amount: int) -> Settlement | None:
    own = not connection.in_atomic_block
    parameters = {
        "hold_cause": hold_cause,
        "most": Int8(amount),
        "limit": Int8(BALANCE_LIMIT),
        "capture_id": new_id("led"),
        "release_id": new_id("led"),
        "at": clock.now(),
    }
    try:
        hold_id, account_id, tool_key, held, captured, recorded = _row(_settle_statement(own), parameters, own)
    except _Repeated:
        return Settlement(Outcome.REPEATED)
    if hold_id is None:
        return None
    if recorded:
        return Settlement(Outcome.MOVED, held, captured, tool_key)
    if captured is not None:
        _take_back(account_id, -captured, -held)
        return Settlement(Outcome.REPEATED, held)
    return Settlement(Outcome.REPEATED if is_recorded(f"settle:{hold_id}") else Outcome.REFUSED, held)


def _take_back(account_id: int, balance: int, held: int) -> None:
    # Another transaction recorded the same cause while this one waited for the account. The change is still our own,
    # unseen by anyone.
    Account.objects.filter(pk=account_id).update(balance=F("balance") - balance, held=F("held") - held)


class _Repeated(Exception):
    """Another transaction recorded the same cause while this statement waited for the account."""


def _row(statement: str, parameters: dict[str, Any], own: bool) -> tuple[Any, ...]:
    """The statement's one row. ``own``: it is a transaction of its own, so a failed one has undone itself."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchone()
    except IntegrityError as error:
        if own and isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise _Repeated from error
        raise


@cache
def _columns() -> list[tuple[str, str]]:
    return [(str(field.column), field.attname) for field in LedgerEntry._meta.concrete_fields]


# Inside a caller's transaction an error would spoil the whole of it, so there a second row of one cause is skipped.
_ON_CONFLICT = {True: "", False: "ON CONFLICT (cause) DO NOTHING"}


@cache
def _post_statement(columns: tuple[str, ...], covered: bool, own: bool) -> str:
    """The row is inserted only if the account's change took effect."""
    kinds = {str(field.column): field.db_type(connection) for field in LedgerEntry._meta.concrete_fields}
    values = ", ".join(f"%({column})s::{kinds[column]}" for column in columns)
    cover = "AND balance + %(change)s - held - %(change_held)s >= 0" if covered else ""
    return f"""
        WITH moved AS (
            UPDATE credits_account
               SET balance = balance + %(change)s, held = held + %(change_held)s, updated_at = %(created_at)s
             WHERE user_id = %(account_id)s AND held + %(change_held)s >= 0
               AND balance + %(change)s BETWEEN -%(limit)s AND %(limit)s {cover}
               AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = %(cause)s)
            RETURNING 1
        ), recorded AS (
            INSERT INTO credits_ledgerentry ({", ".join(columns)}) SELECT {values} FROM moved
            {_ON_CONFLICT[own]} RETURNING 1
        ) SELECT (SELECT count(*) FROM moved), (SELECT count(*) FROM recorded)
    """  # noqa: S608  (column names of our own model)


@cache
def _settle_statement(own: bool) -> str:
    """The capture, if there is one, decides: the release is inserted only beside it, or alone."""
    names = "account_id, tool_key, chat_id, run_id, invocation_id, against_id, type, amount, id, cause, price, reason"
    of_hold = "hold.account_id, tool_key, chat_id, run_id, invocation_id, hold.id"
    return f"""
        WITH hold AS (
            SELECT * FROM credits_ledgerentry WHERE cause = %(hold_cause)s
        ), moved AS (
            UPDATE credits_account account
               SET balance = balance - LEAST(%(most)s, amount), held = held - amount, updated_at = %(at)s
              FROM hold
             WHERE user_id = hold.account_id AND held >= amount
               AND balance - LEAST(%(most)s, amount) >= -%(limit)s
               AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = 'settle:' || hold.id)
            RETURNING LEAST(%(most)s, amount) AS captured, amount - LEAST(%(most)s, amount) AS rest
        ), capture AS (
            INSERT INTO credits_ledgerentry ({names}, created_at)
            SELECT {of_hold}, 'CAPTURE', captured, %(capture_id)s, 'settle:' || hold.id, price, '', %(at)s
              FROM hold, moved WHERE captured > 0 {_ON_CONFLICT[own]} RETURNING 1
        ), release AS (
            INSERT INTO credits_ledgerentry ({names}, created_at)
            SELECT {of_hold}, 'RELEASE', rest, %(release_id)s,
                   'settle:' || hold.id || CASE WHEN captured > 0 THEN ':rest' ELSE '' END, NULL, '', %(at)s
              FROM hold, moved WHERE rest > 0 AND (captured = 0 OR EXISTS (SELECT 1 FROM capture))
            {_ON_CONFLICT[own]} RETURNING 1
        ) SELECT hold.id, hold.account_id, hold.tool_key, hold.amount, (SELECT captured FROM moved),
                 (SELECT count(*) FROM capture) + (SELECT count(*) FROM release)
            FROM (VALUES (1)) one LEFT JOIN hold ON true
    """  # noqa: S608  (column names of our own model)
