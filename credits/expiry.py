"""Grants that expire: how much of each is left, and taking that back.

Credits are spent soonest-to-expire first, then oldest; those that never expire, last. What an open hold stands on is
left until the hold is settled. Until the row of type EXPIRY is written, the credits are there to be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

from django.db import transaction
from django.db.models import BigIntegerField, Case, F, Q, QuerySet, Sum, Value, When
from django.db.models.functions import Cast, Coalesce

from config.database import batches
from config.kernel import clock
from credits import ledger
from credits.models import Account, EntryType, LedgerEntry, PendingExpiry
from credits.reconcile import BALANCE_EFFECT

ACCOUNTS_BATCH = 500
SPENT = Q(type__in=[EntryType.CAPTURE, EntryType.USAGE]) | Q(type=EntryType.ADJUSTMENT, amount__lt=0)


def expire_grants() -> int:
    """Take back what is left of every grant past its time. Returns how many credits (micro) that were."""
    return sum(expire_by_account())


def expire_by_account() -> Iterator[int]:
    """The same, account by account.

    Safe to run twice at once: each account's turn is a transaction that holds its lock.
    """
    last, now = 0, clock.now()
    due = PendingExpiry.objects.filter(expires_at__lte=now).order_by("account_id")
    while accounts := list(
        due.filter(account_id__gt=last).values_list("account_id", flat=True).distinct()[:ACCOUNTS_BATCH]
    ):
        for account_id in accounts:
            if batches.stopping.is_set():
                return
            yield _expire_of(account_id, now)
        last = accounts[-1]


@transaction.atomic
def _expire_of(account_id: int, now: datetime) -> int:
    account = Account.objects.select_for_update().get(pk=account_id)
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
    """What is left of each grant that expires, by its id. The caller holds the account's lock.

    The order of spending changes only where such a grant is made or taken back, so the history is read as the sums
    between those moments.
    """
    entries = LedgerEntry.objects.filter(account_id=account_id)
    marks = list(entries.filter(Q(expires_at__isnull=False) | Q(type=EntryType.EXPIRY)).order_by("created_at", "id"))
    others = entries.filter(expires_at__isnull=True).exclude(type=EntryType.EXPIRY).order_by()
    grants = sorted(
        (mark for mark in marks if mark.expires_at), key=lambda grant: (grant.expires_at, grant.created_at, grant.id)
    )
    left: dict[str, int] = {}
    balance = _sums(others.filter(created_at__lt=marks[0].created_at))[0] if marks else 0
    for mark, following in pairwise([*marks, None]):
        assert mark is not None  # noqa: S101  (for the type checker: only the last one's follower is None)
        if mark.type == EntryType.GRANT:
            balance += mark.amount
            # A grant first fills the hole that usage below zero has left.
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
    effect = Case(
        *(When(type=type, then=F("amount") * sign) for type, sign in BALANCE_EFFECT.items()),
        default=Value(0),
        output_field=BigIntegerField(),
    )
    spent = Case(
        When(Q(SPENT, amount__lt=0), then=-F("amount")),
        When(SPENT, then=F("amount")),
        default=Value(0),
        output_field=BigIntegerField(),
    )
    sums = entries.aggregate(
        change=Cast(Coalesce(Sum(effect), Value(0)), BigIntegerField()),
        spent=Cast(Coalesce(Sum(spent), Value(0)), BigIntegerField()),
    )
    return sums["change"], sums["spent"]
