"""One movement: ledger rows and the account's change that they explain, together or not at all.

For the ledger's own modules alone. How long an account stays locked bounds what one busy user can do, and the number of
round trips decides it: PostgreSQL therefore does a whole movement in one prepared statement, and outside a transaction
of the caller's that statement is the transaction, so that nobody waits for a commit to arrive either. SQLite has one
writer at a time, so plain statements do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import psycopg
from django.db import IntegrityError, connection, transaction
from django.db.models import F
from psycopg.types.numeric import Int8

from config.kernel import clock
from config.kernel.ids import new_id
from credits.models import BALANCE_LIMIT, Account, LedgerEntry


class Outcome(Enum):
    MOVED = "moved"
    REPEATED = "repeated"  # a row with this cause is there already
    REFUSED = "refused"  # the account is missing, or its numbers don't allow it


class Settlement(NamedTuple):
    """``held`` is the hold's amount, ``captured`` what of it was spent just now."""

    outcome: Outcome
    held: int
    captured: int
    tool_key: str | None


# A ledger row by its columns, without those that are null. Not an instance of the model: this is the service's busiest
# path, and to make one and ask it for its fields would take half as long as the database does.
Row = dict[str, Any]


def row_of(entry: LedgerEntry) -> Row:
    given = entry.__dict__
    return {column: given[column] for column in _kinds() if given.get(column) is not None}


def post(rows: Sequence[Row], *, balance: int = 0, held: int = 0, covered: bool = False) -> Outcome:
    """Insert ``rows``, all of one account, and add ``balance`` and ``held`` to it. The first row's cause decides.

    ``covered``: only if available stays at or above zero. Nothing is changed unless the outcome is MOVED.
    """
    if connection.vendor == "postgresql":
        return _post_at_once(rows, balance, held, covered)
    # Without a savepoint: a refusal has written nothing that would have to be undone.
    with transaction.atomic(savepoint=False):
        return _post_in_steps(rows, balance, held, covered)


def settle(hold_cause: str, amount: int) -> Settlement | None:
    """Capture ``amount`` of a hold, or all of it if that is less, and release the rest. None if there is no such hold.

    The first settlement of a hold wins: another is REPEATED and moves nothing.
    """
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        settlement = _settle_alone(hold_cause, amount)
        if settlement:
            return settlement
    # Whether it is settled already is asked when it is settled, by the cause.
    hold = _hold_of(hold_cause)
    if hold is None:
        return None
    hold_id, held, price = hold.pop("id"), hold.pop("amount"), hold.pop("price")
    common = {**{column: value for column, value in hold.items() if value is not None}, "against_id": hold_id}
    common |= {"reason": "", "created_at": clock.now()}
    captured = min(amount, held)
    cause = f"settle:{hold_id}"
    rows: list[Row] = []
    if captured:
        rows.append(
            {**common, "id": new_id("led"), "type": "CAPTURE", "amount": captured, "cause": cause}
            | ({} if price is None else {"price": price})
        )
    if captured < held:
        rest = f"{cause}:rest" if captured else cause
        rows.append({**common, "id": new_id("led"), "type": "RELEASE", "amount": held - captured, "cause": rest})
    outcome = post(rows, balance=-captured, held=-held)
    return Settlement(outcome, held, captured if outcome is Outcome.MOVED else 0, hold["tool_key"])


_HOLD_COLUMNS = ("id", "account_id", "amount", "tool_key", "chat_id", "run_id", "invocation_id", "price")
_FIND_HOLD = f"SELECT {', '.join(_HOLD_COLUMNS)} FROM credits_ledgerentry WHERE cause = %s"  # noqa: S608


def _hold_of(cause: str) -> Row | None:
    if connection.vendor != "postgresql":
        return LedgerEntry.objects.filter(cause=cause).values(*_HOLD_COLUMNS).first()
    with connection.cursor() as cursor:
        cursor.execute(_FIND_HOLD, (cause,))
        found = cursor.fetchone()
    if found is None:
        return None
    hold = dict(zip(_HOLD_COLUMNS, found, strict=True))
    # Django has the driver leave JSON as it is.
    hold["price"] = None if hold["price"] is None else json.loads(hold["price"])
    return hold


def _is_recorded(row: Row) -> bool:
    return LedgerEntry.objects.filter(cause=row["cause"]).exists()


# --- SQLite ----------------------------------------------------------------------------------------------------------
def _post_in_steps(rows: Sequence[Row], balance: int, held: int, covered: bool) -> Outcome:
    first = rows[0]
    if _is_recorded(first):
        return Outcome.REPEATED
    account = Account.objects.filter(
        pk=first["account_id"],
        held__gte=-held,
        balance__range=(-BALANCE_LIMIT - balance, BALANCE_LIMIT - balance),
    )
    if covered:
        account = account.filter(balance__gte=F("held") + held - balance)
    if not account.update(balance=F("balance") + balance, held=F("held") + held, updated_at=first["created_at"]):
        return Outcome.REFUSED
    LedgerEntry.objects.bulk_create([LedgerEntry(**row) for row in rows])
    return Outcome.MOVED


# --- PostgreSQL ------------------------------------------------------------------------------------------------------
def _post_at_once(rows: Sequence[Row], balance: int, held: int, covered: bool) -> Outcome:
    first = rows[0]
    values: dict[str, Any] = {
        "account": first["account_id"],
        "change": Int8(balance),
        "change_held": Int8(held),
        "limit": Int8(BALANCE_LIMIT),
        "first_cause": first["cause"],
        "at": first["created_at"],
    }
    for index, row in enumerate(rows):
        values |= {f"{column}_{index}": value for column, value in row.items()}
        values[f"amount_{index}"] = Int8(row["amount"])
        if "price" in row:
            values[f"price_{index}"] = json.dumps(row["price"])
    shape = tuple(tuple(row) for row in rows)
    with connection.cursor() as cursor:
        if connection.in_atomic_block:
            cursor.execute(_statement(shape, covered), values)
            moved, recorded = cursor.fetchone()
        else:
            try:
                cursor.execute(_transaction(shape, covered), values)
                moved = recorded = cursor.rowcount
            except IntegrityError as error:
                if isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                    return Outcome.REPEATED
                raise
    if recorded:
        return Outcome.MOVED
    if moved:
        # Another transaction recorded the same cause while this one waited for the account. The change is still our
        # own, unseen by anyone: take it back.
        account = Account.objects.filter(pk=first["account_id"])
        account.update(balance=F("balance") - balance, held=F("held") - held)
        return Outcome.REPEATED
    return Outcome.REPEATED if _is_recorded(first) else Outcome.REFUSED


def _settle_alone(hold_cause: str, amount: int) -> Settlement | None:
    """``settle`` as one statement and a transaction of its own. None if nothing moved, for whatever reason."""
    values: dict[str, Any] = {
        "cause": hold_cause,
        "most": Int8(amount),
        "limit": Int8(BALANCE_LIMIT),
        "capture": new_id("led"),
        "release": new_id("led"),
        "at": clock.now(),
    }
    # The statement's NOT EXISTS only spares a second settlement the error: the unique cause decides.
    try:
        with connection.cursor() as cursor:
            cursor.execute(_SETTLE, values)
            moved = {type: (amount, tool_key) for type, amount, tool_key in cursor.fetchall()}
    except IntegrityError as error:
        if isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            return Settlement(Outcome.REPEATED, 0, 0, None)
        raise
    if not moved:
        return None
    captured = moved["CAPTURE"][0] if "CAPTURE" in moved else 0
    (_, tool_key), *_ = moved.values()
    return Settlement(Outcome.MOVED, sum(amount for amount, _ in moved.values()), captured, tool_key)


_SETTLE = """
    WITH hold AS (
        SELECT * FROM credits_ledgerentry WHERE cause = %(cause)s
    ), moved AS (
        UPDATE credits_account
           SET balance = balance - LEAST(%(most)s, amount), held = held - amount, updated_at = %(at)s
          FROM hold
         WHERE user_id = hold.account_id AND held >= amount AND balance - LEAST(%(most)s, amount) >= -%(limit)s
           AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = 'settle:' || hold.id)
        RETURNING LEAST(%(most)s, amount) AS captured
    )
    INSERT INTO credits_ledgerentry
           (account_id, tool_key, chat_id, run_id, invocation_id, against_id, reason, created_at,
            type, amount, id, cause, price)
    SELECT hold.account_id, tool_key, chat_id, run_id, invocation_id, hold.id, '', %(at)s,
           part.type, part.amount, part.id, 'settle:' || hold.id || suffix, part.price
      FROM hold, moved, LATERAL (VALUES
           ('CAPTURE', captured, %(capture)s, '', hold.price),
           ('RELEASE', hold.amount - captured, %(release)s, CASE WHEN captured > 0 THEN ':rest' ELSE '' END, NULL)
           ) part (type, amount, id, suffix, price)
     WHERE part.amount > 0
    RETURNING type, amount, tool_key
"""


@cache
def _kinds() -> dict[str, str | None]:
    return {str(field.column): field.db_type(connection) for field in LedgerEntry._meta.concrete_fields}


def _moved(covered: bool) -> str:
    # That there is no such cause yet is asked to spare a repeated call an error and the lock: the unique cause decides.
    cover = "AND balance + %(change)s - held - %(change_held)s >= 0" if covered else ""
    return f"""moved AS (
        UPDATE credits_account
           SET balance = balance + %(change)s, held = held + %(change_held)s, updated_at = %(at)s
         WHERE user_id = %(account)s AND held + %(change_held)s >= 0
           AND balance + %(change)s BETWEEN -%(limit)s AND %(limit)s {cover}
           AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = %(first_cause)s)
        RETURNING 1
    )"""  # noqa: S608  (column names of our own model)


def _insert(columns: tuple[str, ...], index: int, source: str) -> str:
    values = ", ".join(f"%({column}_{index})s::{_kinds()[column]}" for column in columns)
    return f"INSERT INTO credits_ledgerentry ({', '.join(columns)}) SELECT {values} FROM {source}"  # noqa: S608


@cache
def _transaction(shape: tuple[tuple[str, ...], ...], covered: bool) -> str:
    """The movement as a transaction of its own, whose failure undoes the whole of it."""
    *before, last = (_insert(columns, index, "moved") for index, columns in enumerate(shape))
    steps = [_moved(covered), *(f"row_{index} AS ({insert})" for index, insert in enumerate(before))]
    return f"WITH {', '.join(steps)} {last}"


@cache
def _statement(shape: tuple[tuple[str, ...], ...], covered: bool) -> str:
    """The movement inside a caller's transaction, which an error would spoil: what is recorded already is skipped, and
    a row is inserted only if the step before it took effect."""
    steps, source = [_moved(covered)], "moved"
    for index, columns in enumerate(shape):
        insert = _insert(columns, index, source)
        source = f"row_{index}"
        steps.append(f"{source} AS ({insert} ON CONFLICT (cause) DO NOTHING RETURNING 1)")
    return f"WITH {', '.join(steps)} SELECT (SELECT count(*) FROM moved), (SELECT count(*) FROM row_0)"  # noqa: S608
