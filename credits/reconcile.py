"""Compares accounts and usage totals with the ledger. Corrects nothing: staff must look at a difference first."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from django.db import connection
from django.db.models import F, OuterRef, QuerySet, Subquery, Sum

from config.kernel import money
from credits import models
from credits.models import CHARGES, SETTLEMENTS, Account, EntryType, LedgerEntry, UsageTotal
from credits.sums import effect

DAY = {"postgresql": "(created_at AT TIME ZONE 'UTC')::date", "sqlite": "substr(created_at, 1, 10)"}
SPENDING = "type IN ('CAPTURE', 'USAGE', 'REFUND') AND chat_id IS NOT NULL"
NET = "CASE type WHEN 'REFUND' THEN -amount ELSE amount END"


def kinds() -> dict[type[UsageTotal], tuple[dict[str, str], str, str]]:
    """For each kind of totals: the key columns except the account, each with its SQL for a ledger row; the SQL of a
    row's amount; and the SQL condition of the rows.
    """
    day, tool = DAY[connection.vendor], "COALESCE(tool_key, '')"
    run = {"chat_id": "chat_id", "run_id": "run_id", "tool_key": tool}
    return {
        models.DayTotal: ({"day": day, "tool_key": tool}, "amount", "type IN ('CAPTURE', 'USAGE')"),
        models.ChatTotal: ({"chat_id": "chat_id"}, NET, SPENDING),
        models.ChatDayTotal: ({"day": day, "chat_id": "chat_id"}, NET, SPENDING),
        models.RunTotal: (run, NET, f"{SPENDING} AND run_id IS NOT NULL"),
    }


def drift(report: Callable[[str, int, int], object] = lambda *step: None) -> Iterator[str]:
    """One line for each difference, as soon as it is found. ``report`` gets each step, its number and their total."""
    rules: dict[str, Callable[[], Iterator[str]]] = {"accounts": _accounts, "holds": _holds, "refunds": _refunds}
    rules |= {str(model._meta.verbose_name_plural): partial(drift_of, model) for model in kinds()}
    for number, (name, rule) in enumerate(rules.items(), 1):
        report(name, number, len(rules))
        yield from rule()


def _accounts() -> Iterator[str]:
    # One statement has one snapshot: a concurrent movement is in both sides or in neither.
    accounts = Account.objects.annotate(
        ledger_balance=Sum(effect("balance", "entries__"), default=0),
        ledger_held=Sum(effect("held", "entries__"), default=0),
    ).exclude(balance=F("ledger_balance"), held=F("ledger_held"))
    for account in accounts.select_related("user").order_by("pk").iterator():
        username = account.user.get_username()
        for name in ("balance", "held"):
            actual, expected = getattr(account, name), getattr(account, f"ledger_{name}")
            if actual != expected:
                yield f"{username}: {name} is {money.to_text(actual)}, the ledger says {money.to_text(expected)}"


def _holds() -> Iterator[str]:
    holds = _with_answers([EntryType.HOLD], SETTLEMENTS).filter(answered__isnull=False).exclude(answered=F("amount"))
    for hold in holds.iterator():
        yield f"{hold.id}: a hold of {money.to_text(hold.amount)} was settled with {money.to_text(hold.answered)}"


def _refunds() -> Iterator[str]:
    spent = _with_answers(CHARGES, [EntryType.REFUND])
    for entry in spent.filter(answered__gt=F("amount")).iterator():
        yield f"{entry.id}: {money.to_text(entry.answered)} of {money.to_text(entry.amount)} was refunded"


def _with_answers(types: list[EntryType], answers: list[EntryType]) -> QuerySet[Any]:
    """Rows of ``types`` with ``answered``, the sum of the rows of the types ``answers`` against each."""
    against = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=answers).order_by().values("against")
    total = Subquery(against.annotate(total=Sum("amount")).values("total"))
    return LedgerEntry.objects.filter(type__in=types).annotate(answered=total).order_by("pk")


def drift_of(model: type[UsageTotal]) -> Iterator[str]:
    """Yields one line for each total of a kind that differs from the ledger. The rows are read one by one."""
    columns, amount, rows = kinds()[model]
    keys, sources = ", ".join(["account_id", *columns]), ", ".join(["account_id", *columns.values()])
    # One statement has one snapshot: a concurrent movement is in both sides or in neither.
    statement = f"""
        SELECT {keys}, SUM(stored), SUM(computed) FROM (
            SELECT {keys}, amount AS stored, 0 AS computed, records, latest, 1 AS sides FROM {model._meta.db_table}
            UNION ALL
            SELECT {sources}, 0, SUM({amount}), -COUNT(*), MAX(created_at), -1
            FROM credits_ledgerentry WHERE {rows} GROUP BY {sources}
        ) compared GROUP BY {keys}
        HAVING SUM(stored) <> SUM(computed) OR SUM(records) <> 0 OR SUM(sides) <> 0 OR MIN(latest) <> MAX(latest)
        ORDER BY {keys}
    """  # noqa: S608
    # A server-side cursor, for hundreds of thousands of differences. It does not exist behind PgBouncer.
    unavailable = connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    with connection.cursor() if unavailable else connection.chunked_cursor() as cursor:
        cursor.execute(statement)
        for account_id, *key, stored, computed in cursor:
            name = Account.objects.select_related("user").get(pk=account_id).user.get_username()
            of = ", ".join(f"{column} {value or '-'}" for column, value in zip(columns, key, strict=True))
            yield (
                f"{name}: {model._meta.verbose_name} of {of} is {money.to_text(int(stored))},"
                f" the ledger says {money.to_text(int(computed))}"
            )
