"""Grants that expire: the unspent part of each, and the EXPIRY rows that remove it.

The grant that expires first is spent first; of grants that expire together, the oldest. Credits that never expire are
spent last. The part that open holds need stays until they are settled. Credits can be spent until their EXPIRY row
exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import zip_longest

from django.db import transaction
from django.db.models import BigIntegerField, Case, F, Q, QuerySet, Sum, Value, When
from django.db.models.functions import Abs

from config.kernel import clock
from config.queue import jobs
from credits import ledger
from credits.models import Account, EntryType, LedgerEntry, PendingExpiry
from credits.reconcile import BALANCE_EFFECT

ACCOUNTS_BATCH = 500
SPENT = Q(type__in=[EntryType.CAPTURE, EntryType.USAGE]) | Q(type=EntryType.ADJUSTMENT, amount__lt=0)


def expire_grants() -> Iterator[int]:
    """Remove the unspent part of each grant that has expired; yields the micro-credits removed from each account.

    Two calls may run at the same time: each account is a transaction that locks it.
    """
    now = clock.now()
    return jobs.each("expire-grants", _accounts_due(now), partial(_expire_of, now=now))


def _accounts_due(now: datetime) -> Iterator[int]:
    last = 0
    due = PendingExpiry.objects.filter(expires_at__lte=now).order_by("account_id")
    while accounts := list(
        due.filter(account_id__gt=last).values_list("account_id", flat=True).distinct()[:ACCOUNTS_BATCH]
    ):
        yield from accounts
        last = accounts[-1]


@transaction.atomic
def _expire_of(account_id: int, now: datetime) -> int:
    """A locked account is left to the next call."""
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
    """The unspent part of each expiring grant, by grant id. The caller holds the account's lock.

    The order of spending changes only where such a grant begins or an EXPIRY row removes one. Sums between these
    moments are therefore enough.
    """
    entries = LedgerEntry.objects.filter(account_id=account_id)
    marks = list(entries.filter(Q(expires_at__isnull=False) | Q(type=EntryType.EXPIRY)).order_by("created_at", "id"))
    others = entries.filter(expires_at__isnull=True).exclude(type=EntryType.EXPIRY).order_by()
    grants = sorted(
        (mark for mark in marks if mark.expires_at), key=lambda grant: (grant.expires_at, grant.created_at, grant.id)
    )
    left: dict[str, int] = {}
    balance = _sums(others.filter(created_at__lt=marks[0].created_at))[0] if marks else 0
    for mark, following in zip_longest(marks, marks[1:]):
        if mark.type == EntryType.GRANT:
            balance += mark.amount
            # A grant first covers a negative balance.
            left[mark.id] = min(mark.amount, max(0, balance))
        else:
            balance -= mark.amount
            left[str(mark.against_id)] -= mark.amount
        between = others.filter(created_at__gte=mark.created_at)
        change, spent = _sums(between.filter(created_at__lt=following.created_at) if following else between)
        balance += change
        for grant in grants:
            used = min(left.get(grant.id, 0), spent)
            if used:
                left[grant.id] -= used
                spent -= used
    return left


def _sums(entries: QuerySet[LedgerEntry]) -> tuple[int, int]:
    """(change of the balance, what was spent)"""
    whens = [When(type=type, then=F("amount") * sign) for type, sign in BALANCE_EFFECT.items()]
    effect = Case(*whens, default=Value(0), output_field=BigIntegerField())
    sums = entries.aggregate(change=Sum(effect, default=0), spent=Sum(Abs("amount"), filter=SPENT, default=0))
    return sums["change"], sums["spent"]
