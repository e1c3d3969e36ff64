"""Compares the accounts with the ledger. Differences are reported and never corrected: staff must look first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from django.db.models import F, OuterRef, QuerySet, Subquery, Sum

from config.kernel import money
from credits import totals
from credits.models import SETTLEMENTS, Account, EntryType, LedgerEntry
from credits.sums import change


def drift(report: Callable[[str, int, int], object] = lambda *step: None) -> Iterator[str]:
    """Yields one line for each difference as soon as it is found. ``report`` gets each step, its number and total."""
    rules: dict[str, Callable[[], Iterator[str]]] = {"accounts": _accounts, "holds": _holds, "refunds": _refunds}
    rules |= {str(kind.model._meta.verbose_name_plural): partial(totals.drift, kind) for kind in totals.kinds()}
    for number, (name, rule) in enumerate(rules.items(), 1):
        report(name, number, len(rules))
        yield from rule()


def _accounts() -> Iterator[str]:
    # One statement has one snapshot: a concurrent movement is in both sides or in neither.
    accounts = Account.objects.annotate(
        ledger_balance=change("balance", "entries__"), ledger_held=change("held", "entries__")
    ).exclude(balance=F("ledger_balance"), held=F("ledger_held"))
    for account in accounts.select_related("user").order_by("pk").iterator():
        username = account.user.get_username()
        for name, actual, expected in (
            ("balance", account.balance, account.ledger_balance),
            ("held", account.held, account.ledger_held),
        ):
            if actual != expected:
                yield f"{username}: {name} is {money.to_text(actual)}, the ledger says {money.to_text(expected)}"


def _holds() -> Iterator[str]:
    holds = _with_answers([EntryType.HOLD], SETTLEMENTS).filter(answered__isnull=False).exclude(answered=F("amount"))
    for hold in holds.iterator():
        yield f"{hold.id}: a hold of {money.to_text(hold.amount)} was settled with {money.to_text(hold.answered)}"


def _refunds() -> Iterator[str]:
    spent = _with_answers([EntryType.CAPTURE, EntryType.USAGE], [EntryType.REFUND])
    for entry in spent.filter(answered__gt=F("amount")).iterator():
        yield f"{entry.id}: {money.to_text(entry.answered)} of {money.to_text(entry.amount)} was refunded"


def _with_answers(types: list[EntryType], answers: list[EntryType]) -> QuerySet[Any]:
    """Rows with ``answered``, the sum of the rows of these types against them."""
    against = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=answers).order_by().values("against")
    total = Subquery(against.annotate(total=Sum("amount")).values("total"))
    return LedgerEntry.objects.filter(type__in=types).annotate(answered=total).order_by("pk")
