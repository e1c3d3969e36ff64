"""One movement: ledger rows and the account's change that they explain, together or not at all.

For the ledger's own modules alone. How long an account stays locked bounds what one busy user can do, and the number of
round trips decides it: PostgreSQL therefore does the whole movement in one statement. SQLite has one writer at a time,
so three plain statements do.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any

from django.db import connection, transaction
from django.db.models import F

from credits.models import BALANCE_LIMIT, Account, LedgerEntry


class Outcome(Enum):
    MOVED = "moved"
    REPEATED = "repeated"  # a row with this cause is there already
    REFUSED = "refused"  # the account is missing, or its numbers don't allow it


def post(rows: Sequence[LedgerEntry], *, balance: int, held: int, covered: bool) -> Outcome:
    """Insert ``rows``, all of one account, and add ``balance`` and ``held`` to it. The first row's cause decides.

    ``covered``: only if available stays at or above zero. Nothing is changed unless the outcome is MOVED.
    """
    # Without a savepoint: a refusal has written nothing that would have to be undone.
    with transaction.atomic(savepoint=False):
        if connection.vendor == "postgresql":
            return _post_at_once(rows, balance, held, covered)
        return _post_in_steps(rows, balance, held, covered)


def _post_in_steps(rows: Sequence[LedgerEntry], balance: int, held: int, covered: bool) -> Outcome:
    if _is_recorded(rows[0]):
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


def _post_at_once(rows: Sequence[LedgerEntry], balance: int, held: int, covered: bool) -> Outcome:
    first = rows[0]
    parameters: dict[str, Any] = {
        "account": first.account_id,
        "balance": balance,
        "held": held,
        "covered": covered,
        "limit": BALANCE_LIMIT,
        "cause": first.cause,
        "at": first.created_at,
    }
    for index, row in enumerate(rows):
        for field in LedgerEntry._meta.concrete_fields:
            value = field.get_db_prep_save(getattr(row, field.attname), connection)
            parameters[f"{field.column}_{index}"] = value
    with connection.cursor() as cursor:
        cursor.execute(_statement(len(rows)), parameters)
        moved, recorded = cursor.fetchone()
        if recorded:
            return Outcome.MOVED
        if moved:
            # Another transaction recorded the same cause while this one waited for the account. The change is still
            # our own, unseen by anyone: take it back.
            cursor.execute(_TAKE_BACK, parameters)
            return Outcome.REPEATED
    return Outcome.REPEATED if _is_recorded(first) else Outcome.REFUSED


def _is_recorded(row: LedgerEntry) -> bool:
    return LedgerEntry.objects.filter(cause=row.cause).exists()


_TAKE_BACK = """
    UPDATE credits_account SET balance = balance - %(balance)s, held = held - %(held)s WHERE user_id = %(account)s
"""


@cache
def _statement(rows: int) -> str:
    """A row is inserted only if the step before it took effect: the account's change, the first row, the next."""
    columns = [(str(field.column), field.db_type(connection)) for field in LedgerEntry._meta.concrete_fields]
    names = ", ".join(name for name, _ in columns)
    steps = [
        """moved AS (
            UPDATE credits_account
               SET balance = balance + %(balance)s, held = held + %(held)s, updated_at = %(at)s
             WHERE user_id = %(account)s
               AND held + %(held)s >= 0
               AND balance + %(balance)s BETWEEN -%(limit)s AND %(limit)s
               AND (NOT %(covered)s OR balance + %(balance)s - held - %(held)s >= 0)
               AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = %(cause)s)
            RETURNING 1
        )"""
    ]
    source = "moved"
    for index in range(rows):
        values = ", ".join(f"%({name}_{index})s::{kind}" for name, kind in columns)
        steps.append(
            f"""row_{index} AS (
            INSERT INTO credits_ledgerentry ({names}) SELECT {values} FROM {source}
            ON CONFLICT (cause) DO NOTHING RETURNING 1
        )"""  # noqa: S608  (column names of our own model)
        )
        source = f"row_{index}"
    return f"WITH {', '.join(steps)} SELECT (SELECT count(*) FROM moved), (SELECT count(*) FROM row_0)"  # noqa: S608
