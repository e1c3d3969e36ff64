"""The one UPDATE that changes an account. For ``ledger.py`` only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import connection

from credits import low
from credits.models import BALANCE_LIMIT, LedgerEntry


class Condition(NamedTuple):
    """A condition in SQL, for a movement that depends on a row of another app."""

    sql: str
    values: Sequence[Any]


# Staff may take available below zero; the part below zero is the debt.
_CHANGE_ACCOUNT = """
    UPDATE credits_account SET balance = balance + %s, held = held + %s, updated_at = %s,
           debt = CASE WHEN balance + %s >= held + %s THEN 0 WHEN %s THEN held + %s - balance - %s ELSE debt END,
           low_due = low_due{crossed}
     WHERE user_id = %s AND held + %s >= 0 AND balance + %s BETWEEN %s AND %s
       AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = %s)
"""
# Sets one bit for each threshold that the balance falls below. ``low.py`` reports and clears the bits.
_CROSSED = " | (CASE WHEN balance >= {0} AND balance + %s < {0} THEN {1} ELSE 0 END)"
_COVERED = " AND balance + %s >= held + %s"


def movement(
    first: LedgerEntry,
    *,
    balance: int,
    held: int,
    covered: bool = False,
    by_staff: bool = False,
    only_if: Condition | None = None,
) -> tuple[str, list[Any]]:
    """The UPDATE and its values; ``ledger._post`` has the arguments. ``first``: the first row of the movement."""
    crossed = "".join(_CROSSED.format(threshold, 1 << bit) for bit, threshold in enumerate(low.thresholds()))
    now = connection.ops.adapt_datetimefield_value(first.created_at)
    values: list[Any] = [balance, held, now, balance, held, by_staff, held, balance]
    values += [balance] * len(low.thresholds())
    values += [first.account_id, held, balance, -BALANCE_LIMIT, BALANCE_LIMIT, first.cause]
    statement = _CHANGE_ACCOUNT.format(crossed=crossed)
    if covered:
        statement, values = statement + _COVERED, [*values, balance, held]
    if only_if is not None:
        statement, values = f"{statement} AND {only_if.sql}", [*values, *only_if.values]
    return statement, values
