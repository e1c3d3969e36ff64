"""Grants that expire: the unspent part of each, and the EXPIRY rows that remove it.

The grant that expires first is spent first, and of grants that expire together the oldest. Credits that never expire
are spent last. Open holds keep the part that they need until they are settled. Credits can be spent until their EXPIRY
row exists.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import Any

from django.db import transaction
from django.db.models import Case, OuterRef, Q, Sum, When
from django.db.models.functions import TruncDay

from config.database.batches import in_order
from config.kernel import clock
from config.queue import jobs
from credits import ledger, statement
from credits.models import CHARGES, REVOCATION, STAFF_TYPES, Account, DayTotal, EntryType, LedgerEntry, PendingExpiry
from credits.sums import sum_by, total

ACCOUNTS_BATCH = 500
# The rows at which the order of spending changes: expiring grants, expiries, and revocations of any grant.
MARK = Q(expires_at__isnull=False) | Q(type=EntryType.EXPIRY) | REVOCATION


def expire_grants() -> Iterator[int]:
    """Remove the unspent part of each grant that has expired; yields the micro-credits removed from each account."""
    now = clock.now()
    due = Account.objects.filter(pk__in=PendingExpiry.objects.filter(expires_at__lte=now).values("account_id"))
    return jobs.each("expire-grants", in_order(due, "pk", ACCOUNTS_BATCH), partial(_expire_of, now=now))


def expire_all() -> int:
    return sum(1 for _ in expire_grants())


@transaction.atomic
def _expire_of(account_id: int, now: datetime) -> int:
    """Returns the micro-credits that were removed. A locked account is left to the next call."""
    account = Account.objects.select_for_update(no_key=True, skip_locked=True).filter(pk=account_id).first()
    if account is None:
        return 0
    due = list(PendingExpiry.objects.filter(account_id=account_id, expires_at__lte=now).order_by("expires_at", "pk"))
    left = unspent(account_id)
    available = max(0, account.available)
    total = 0
    for pending in due:
        amount = min(left[pending.grant_id], available - total)
        if amount:
            part = LedgerEntry.objects.filter(against_id=pending.grant_id, type=EntryType.EXPIRY).count()
            ledger.expire(pending, amount, part)
            total += amount
        if amount == left[pending.grant_id]:
            pending.delete()
    return total


def unspent(account_id: int) -> dict[str, int]:
    """The unspent micro-credits of each expiring grant, by grant id. The caller holds the account's lock. Two queries.

    Charges, of which there can be millions, are read as sums: those of whole days, and for each mark those of its day
    until then.
    """
    charges = LedgerEntry.objects.filter(account_id=account_id, type__in=CHARGES)
    of_day = charges.filter(created_at__gte=OuterRef("midnight"), created_at__lt=OuterRef("created_at"))
    rows: Any = LedgerEntry.objects.filter(account_id=account_id, type__in=STAFF_TYPES).order_by("created_at", "pk")
    rows = rows.annotate(midnight=TruncDay("created_at", tzinfo=UTC))
    rows = rows.annotate(charged=Case(When(MARK, then=sum_by("account_id", of_day, "amount"))))
    totals = DayTotal.objects.filter(account_id=account_id).order_by("day")
    by_day = list(totals.values_list("day").annotate(total=Sum("amount")))
    until = list(accumulate((total for _, total in by_day), initial=0))
    live: list[LedgerEntry] = []  # the grants that may have something left, in the order of spending
    left: dict[str, int] = {}

    def spend(amount: int) -> None:
        while amount and live:
            used = min(left[live[0].id], amount)
            left[live[0].id] -= used
            amount -= used
            if not left[live[0].id]:
                del live[0]

    balance = charged = 0
    for row in rows:
        if row.charged is not None:
            since = until[bisect_left(by_day, (row.created_at.date(),))] + row.charged - charged
            charged += since
            balance -= since
            spend(since)
        change = statement.effect(row)
        balance += change
        if row.expires_at is not None:
            # A grant first covers a negative balance.
            left[row.id] = min(change, max(0, balance))
            insort(live, row, key=lambda grant: (grant.expires_at, grant.created_at, grant.pk))
        elif row.against_id is not None and row.type != EntryType.REFUND:
            # If a revoked grant was spent, the rest is taken from the others.
            expires = row.against_id in left
            of_grant = min(left[row.against_id] if expires else row.price["left"], -change)
            if expires:
                left[row.against_id] -= of_grant
            spend(-change - of_grant)
        elif change < 0:
            spend(-change)
    spend(until[-1] - charged)
    return left


def left_of(grant: LedgerEntry, balance: int) -> int:
    """The unspent part of a grant in micro-credits. The caller holds the account's lock; ``balance`` is the account's.

    Of the credits that never expire, the oldest are spent first, so the rest of them is the newest.
    """
    expiring = unspent(grant.account_id)
    if grant.expires_at is not None:
        return expiring[grant.id]
    newer = Q(created_at__gt=grant.created_at) | Q(created_at=grant.created_at, id__gt=grant.id)
    added = LedgerEntry.objects.filter(newer, account_id=grant.account_id, expires_at=None, amount__gt=0)
    added = added.filter(type__in=[EntryType.GRANT, EntryType.REFUND, EntryType.ADJUSTMENT])
    revoked = LedgerEntry.objects.filter(REVOCATION, account_id=grant.account_id)
    # Revocations of newer grants reduce these grants; the grant's own revocations reduce it.
    own = total(revoked.filter(against=grant))
    others = total(added) + total(revoked.filter(against__in=added.filter(type=EntryType.GRANT)))
    return max(0, min(grant.amount + own, balance - sum(expiring.values()) - others))


def expiring(account_id: int) -> list[dict[str, Any]]:
    """What is left of the expiring grants, summed by time of expiry: ``{amount, at}``, soonest first."""
    pending = dict(PendingExpiry.objects.filter(account_id=account_id).values_list("grant_id", "expires_at"))
    by_time: Counter[datetime] = Counter()
    for grant_id, amount in unspent(account_id).items() if pending else ():
        if grant_id in pending:
            by_time[pending[grant_id]] += amount
    return [{"amount": amount, "at": moment} for moment, amount in sorted(by_time.items()) if amount]
