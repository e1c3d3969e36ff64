"""What runs have spent and what they hold, in micro-credits, from the ledger's rows."""

from datetime import datetime
from typing import Any, Literal

from django.db.models import BigIntegerField, Case, Exists, F, OuterRef, QuerySet, Subquery, Sum, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, Coalesce

from config.database.queries import CompiledQuery
from credits.models import CHARGES, SETTLEMENTS, SPENDING, Account, EntryType, LedgerEntry

REACHING_ROWS = 200  # The most rows that ``reached_by`` searches.
# The signed amounts of SPENDING rows (a refund is negative), and of the rows of ``_committed``.
NET_SPENDING = Case(When(type__in=CHARGES, then=F("amount")), default=-F("amount"), output_field=BigIntegerField())
_NET_HOLDS = Case(When(type=EntryType.HOLD, then=F("amount")), default=-F("amount"), output_field=BigIntegerField())


def refundable(entry: LedgerEntry) -> int:
    """The part of a CAPTURE or USAGE row that is not refunded yet."""
    return entry.amount - total(LedgerEntry.objects.filter(against=entry, type=EntryType.REFUND))


def committed(run_id: str) -> int:
    """What the run has spent and holds."""
    return total(_committed(run_id), _NET_HOLDS)


def committed_subquery(outer: str) -> Combinable:
    """``committed`` as an expression for a queryset; ``outer`` holds the run's id."""
    return sum_by("run_id", _committed(OuterRef(outer)), _NET_HOLDS)


def _committed(run_id: Any) -> QuerySet[LedgerEntry]:
    # A capture or usage moves its amount from held to spent, so the sum does not need it.
    return LedgerEntry.objects.filter(run_id=run_id).exclude(type__in=CHARGES)


def run_spent_subquery(outer: str = "pk") -> Combinable:
    """A run's captures and usage less refunds, as an expression for a queryset; ``outer`` holds the run's id."""
    return sum_by("run_id", LedgerEntry.objects.filter(run_id=OuterRef(outer), type__in=SPENDING), NET_SPENDING)


def effect(of: Literal["balance", "held"], entries: str = "") -> Combinable:
    """What a row adds to its account's balance or held amount. ``entries``: the lookup prefix that leads to the row."""
    signs = {type: getattr(type, of) for type in EntryType if getattr(type, of)}
    whens = [When(**{f"{entries}type": type}, then=F(f"{entries}amount") * sign) for type, sign in signs.items()]
    return Case(*whens, default=Value(0), output_field=BigIntegerField())


def reached_by(user_id: int, needed: int, run_id: str, budget: int | None) -> tuple[str, datetime | None]:
    """The type and time of the row by which ``needed`` became available, and was left of the run's budget, of which
    ``budget`` is left now. (RELEASE, None) if none of the newest REACHING_ROWS is that row.
    """
    left = Account.objects.get(pk=user_id).available
    rows = LedgerEntry.objects.filter(account_id=user_id).order_by("-created_at", "-pk")
    for type, amount, of_run, created_at in rows.values_list("type", "amount", "run_id", "created_at")[:REACHING_ROWS]:
        change = (EntryType[type].balance - EntryType[type].held) * amount
        left -= change
        if budget is not None and of_run == run_id:
            budget -= change
        if change > 0 and (left < needed or (budget is not None and budget < needed)):
            return type, created_at
    return EntryType.RELEASE, None


def open_holds_of(**runs: Any) -> QuerySet[LedgerEntry]:
    """The holds that are not settled. Those of requests to models have no ``tool_key``."""
    settled = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS)
    return LedgerEntry.objects.filter(~Exists(settled), type=EntryType.HOLD, **runs)


open_holds: CompiledQuery[LedgerEntry] = CompiledQuery(lambda run_id: open_holds_of(run_id=run_id), str)


def held_by(run_ids: QuerySet[Any], *, without_calls: QuerySet[Any]) -> Combinable:
    """An expression: the sum of the open holds of these runs, except those of the calls ``without_calls``."""
    holds = open_holds_of(run_id__in=run_ids).exclude(invocation_id__in=without_calls)
    return Cast(sum_by("type", holds, "amount"), BigIntegerField())


def sum_by(key: str, rows: QuerySet[Any], amount: str | Combinable) -> Combinable:
    """The sum over ``rows``, which all have the same ``key``, as an expression."""
    total = rows.order_by().values(key).annotate(total=Sum(amount)).values("total")
    return Coalesce(Subquery(total), Value(0))


def total(rows: QuerySet[LedgerEntry], amount: str | Combinable = "amount") -> int:
    return rows.order_by().aggregate(total=Sum(amount, default=0))["total"]
