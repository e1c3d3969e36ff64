"""Grants that expire: the unspent part of each, and the EXPIRY rows that remove it.

The grant that expires first is spent first, and of grants that expire together the oldest. Credits that never expire
are spent last. Open holds keep the part that they need until they are settled. Credits can be spent until their EXPIRY
row exists.
"""

from bisect import insort
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Case, Count, Q, When, Window
from django.db.models.functions import Abs

from config.database.queries import read
from config.kernel import clock
from config.queue import jobs
from credits import ledger
from credits.models import CHARGES, REVOCATION, Account, EntryType, LedgerEntry, PendingExpiry
from credits.sums import effect, total

ACCOUNTS_BATCH = 500
SPENT = Q(type__in=CHARGES) | Q(type=EntryType.ADJUSTMENT, amount__lt=0)
# The rows at which the order of spending changes: expiring grants, expiries, and revocations of any grant.
MARK = Q(expires_at__isnull=False) | Q(type=EntryType.EXPIRY) | REVOCATION


def expire_grants() -> Iterator[int]:
    """Remove the unspent part of each grant that has expired; yields the micro-credits removed from each account."""
    now = clock.now()
    return jobs.each("expire-grants", _accounts_due(now), partial(_expire_of, now=now))


def expire_all() -> int:
    return sum(1 for _ in expire_grants())


def _accounts_due(now: datetime) -> Iterator[int]:
    last, due = 0, PendingExpiry.objects.filter(expires_at__lte=now).order_by("account_id")
    keys = due.values_list("account_id", flat=True).distinct()
    while accounts := list(keys.filter(account_id__gt=last)[:ACCOUNTS_BATCH]):
        yield from accounts
        last = accounts[-1]


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
    """The unspent micro-credits of each expiring grant, by grant id. The caller holds the account's lock. Four queries.

    The order of spending changes only where such a grant begins, expires or is revoked, so sums between these moments
    are enough.
    """
    entries = LedgerEntry.objects.filter(account_id=account_id).order_by()
    grants = list(entries.filter(expires_at__isnull=False))
    if not grants:
        return {}
    expired = list(LedgerEntry.objects.filter(type=EntryType.EXPIRY, against__in=grants))
    revoked = list(entries.filter(REVOCATION))
    marks: list[Any] = sorted([*grants, *expired, *revoked], key=lambda mark: (mark.created_at, mark.id))
    # Each row that changes the balance gets the number of marks up to it, in one pass: there can be as many grants as
    # days.
    parts = entries.exclude(type__in=[EntryType.HOLD, EntryType.RELEASE]).annotate(
        part=Window(Count("pk", filter=MARK), order_by="created_at"),
        change=Case(When(~MARK, then=effect())),
        spent=Case(When(SPENT & ~MARK, then=Abs("amount"))),
    )
    rows, values = parts.values("part", "change", "spent").query.sql_with_params()
    summed = f"SELECT part, SUM(change), SUM(spent) FROM ({rows}) parts GROUP BY part"  # noqa: S608
    sums = {part: (int(change or 0), int(spent or 0)) for part, change, spent in read(summed, values)}
    live: list[LedgerEntry] = []  # the grants that may have something left, in the order of spending
    left: dict[str, int] = {}
    balance, _ = sums.get(0, (0, 0))
    for number, mark in enumerate(marks, 1):
        spent = 0
        if mark.type == EntryType.GRANT:
            balance += mark.amount
            # A grant first covers a negative balance.
            left[mark.id] = min(mark.amount, max(0, balance))
            insort(live, mark, key=_in_order)
        else:
            amount, grant_id = abs(mark.amount), str(mark.against_id)
            balance -= amount
            of_grant = min(left[grant_id] if grant_id in left else mark.price["left"], amount)
            if grant_id in left:
                left[grant_id] -= of_grant
            spent = amount - of_grant  # if a revoked grant was spent, the rest is taken from the others
        change, used_up = sums.get(number, (0, 0))
        balance += change
        spent += used_up
        while spent and live:
            used = min(left[live[0].id], spent)
            left[live[0].id] -= used
            spent -= used
            if not left[live[0].id]:
                del live[0]
    return left


def _in_order(grant: LedgerEntry) -> tuple[Any, ...]:
    return grant.expires_at, grant.created_at, grant.pk


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


def expiring(account_id: int) -> list[tuple[int, datetime]]:
    """What is left of the expiring grants, summed by time of expiry: (micro-credits, time), soonest first."""
    pending = dict(PendingExpiry.objects.filter(account_id=account_id).values_list("grant_id", "expires_at"))
    if not pending:
        return []
    by_time: dict[datetime, int] = {}
    for grant_id, amount in unspent(account_id).items():
        if amount and grant_id in pending:
            by_time[pending[grant_id]] = by_time.get(pending[grant_id], 0) + amount
    return [(amount, moment) for moment, amount in sorted(by_time.items())]
