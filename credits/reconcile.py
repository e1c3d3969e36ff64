"""Compares accounts and usage totals with the ledger. Corrects nothing: staff must look at a difference first."""

from collections.abc import Callable, Iterator
from typing import Any

from django.db import connection
from django.db.models import F, OuterRef, Q, QuerySet, Subquery, Sum

from config.kernel import money
from credits import models
from credits.models import CHARGES, SETTLEMENTS, Account, EntryType, LedgerEntry, UsageTotal
from credits.sums import effect

DAY = {"postgresql": "(created_at AT TIME ZONE 'UTC')::date", "sqlite": "substr(created_at, 1, 10)"}
NET = "CASE type WHEN 'REFUND' THEN -amount ELSE amount END"
KINDS = (models.DayTotal, models.ChatTotal, models.ChatDayTotal, models.RunTotal)
EXCEEDS = Q(answered__gt=F("amount"))
DIFFERS = EXCEEDS | Q(answered__lt=F("amount"))


def drift(report: Callable[[str, int, int], object] = lambda *step: None) -> Iterator[str]:
    """One line for each difference, as soon as it is found. ``report`` gets each step, its number and their total."""
    rules = {
        "accounts": _accounts(),
        "holds": _answered([EntryType.HOLD], SETTLEMENTS, DIFFERS, "a hold of {amount} was settled with {answered}"),
        "refunds": _answered(CHARGES, [EntryType.REFUND], EXCEEDS, "{answered} of {amount} was refunded"),
    }
    rules |= {str(model._meta.verbose_name_plural): drift_of(model) for model in KINDS}
    for number, (name, found) in enumerate(rules.items(), 1):
        report(name, number, len(rules))
        yield from found


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


def _answered(types: list[EntryType], answers: list[EntryType], wrong: Q, text: str) -> Iterator[str]:
    """The rows of ``types`` for which ``answered``, the sum of the rows of ``answers`` against each, is wrong."""
    against = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=answers).order_by().values("against")
    answered = Subquery(against.annotate(total=Sum("amount")).values("total"))
    rows: QuerySet[Any] = LedgerEntry.objects.filter(type__in=types).annotate(answered=answered).filter(wrong)
    for entry in rows.order_by("pk").iterator():
        amounts = {"amount": money.to_text(entry.amount), "answered": money.to_text(entry.answered)}
        yield f"{entry.id}: {text.format(**amounts)}"


def drift_of(model: type[UsageTotal]) -> Iterator[str]:
    """Yields one line for each total of a kind that differs from the ledger. The rows are read one by one."""
    of_row = {"day": DAY[connection.vendor], "tool_key": "COALESCE(tool_key, '')"}
    columns = [field.attname for field in model._meta.pk_fields]
    keys, sources = ", ".join(columns), ", ".join(of_row.get(column, column) for column in columns)
    # Rows without a chat or a run are in no total by chat or by run.
    conditions = [f"{column} IS NOT NULL" for column in columns if column in ("chat_id", "run_id")]
    types = ", ".join(f"'{type}'" for type in model.types)
    rows = " AND ".join([f"type IN ({types})", *conditions])
    # One statement has one snapshot: a concurrent movement is in both sides or in neither.
    statement = f"""
        SELECT {keys}, SUM(stored), SUM(computed) FROM (
            SELECT {keys}, amount AS stored, 0 AS computed, records, latest, 1 AS sides FROM {model._meta.db_table}
            UNION ALL
            SELECT {sources}, 0, SUM({NET}), -COUNT(*), MAX(created_at), -1
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
            of = ", ".join(f"{column} {value or '-'}" for column, value in zip(columns[1:], key, strict=True))
            yield (
                f"{name}: {model._meta.verbose_name} of {of} is {money.to_text(int(stored))},"
                f" the ledger says {money.to_text(int(computed))}"
            )
