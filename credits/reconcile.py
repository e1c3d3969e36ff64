"""Whether the accounts still say what the ledger says. Finds drift and never mends it: a person looks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from django.db.models import BigIntegerField, Case, F, OuterRef, Q, Subquery, Sum, Value, When
from django.db.models.functions import Cast, Coalesce

from config.kernel import money
from credits import totals
from credits.models import SETTLEMENTS, Account, EntryType, LedgerEntry

BALANCE_EFFECT = {
    EntryType.GRANT: 1,
    EntryType.REFUND: 1,
    EntryType.ADJUSTMENT: 1,
    EntryType.CAPTURE: -1,
    EntryType.USAGE: -1,
    EntryType.EXPIRY: -1,
}
HELD_EFFECT = {EntryType.HOLD: 1, EntryType.CAPTURE: -1, EntryType.RELEASE: -1}


def drift(tell: Callable[[str], object] = lambda line: None) -> Iterator[str]:
    """One line for each thing that does not add up, as it is found. ``tell`` hears how far it has come."""
    rules: dict[str, Callable[[], Iterator[str]]] = {"accounts": _accounts, "holds": _holds, "refunds": _refunds}
    rules |= {str(kind.model._meta.verbose_name_plural): partial(totals.drift, kind) for kind in totals.kinds()}
    for number, (name, rule) in enumerate(rules.items(), 1):
        tell(f"{number} of {len(rules)}: {name}")
        yield from rule()


def _accounts() -> Iterator[str]:
    # One statement, so that what is booked meanwhile is seen on both sides or on neither.
    accounts = Account.objects.annotate(
        ledger_balance=_effect(BALANCE_EFFECT), ledger_held=_effect(HELD_EFFECT)
    ).exclude(balance=F("ledger_balance"), held=F("ledger_held"))
    for account in accounts.select_related("user").order_by("pk").iterator():
        name = account.user.get_username()
        for what, says, is_booked in (
            ("balance", account.balance, account.ledger_balance),
            ("held", account.held, account.ledger_held),
        ):
            if says != is_booked:
                yield f"{name}: {what} is {money.to_text(says)}, the ledger says {money.to_text(is_booked)}"


def _effect(signs: dict[EntryType, int]) -> Cast:
    whens = [When(entries__type=type, then=F("entries__amount") * sign) for type, sign in signs.items()]
    return _total(Case(*whens, default=Value(0), output_field=BigIntegerField()))


def _holds() -> Iterator[str]:
    settled = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS).order_by().values("against")
    holds = LedgerEntry.objects.filter(type=EntryType.HOLD).annotate(
        settled=Subquery(settled.annotate(total=_total(F("amount"))).values("total"))
    )
    for hold in holds.filter(settled__isnull=False).exclude(settled=F("amount")).order_by("pk").iterator():
        yield f"{hold.id}: a hold of {money.to_text(hold.amount)} was settled with {money.to_text(hold.settled)}"


def _refunds() -> Iterator[str]:
    refunds = LedgerEntry.objects.filter(against=OuterRef("pk"), type=EntryType.REFUND).order_by().values("against")
    spent = LedgerEntry.objects.filter(type__in=[EntryType.CAPTURE, EntryType.USAGE]).annotate(
        refunded=Subquery(refunds.annotate(total=_total(F("amount"))).values("total"))
    )
    for entry in spent.filter(Q(refunded__gt=F("amount"))).order_by("pk").iterator():
        yield f"{entry.id}: {money.to_text(entry.refunded)} of {money.to_text(entry.amount)} was refunded"


def _total(amount: F | Case) -> Cast:
    return Cast(Coalesce(Sum(amount), Value(0)), BigIntegerField())
