"""Grants for payments, once per ``reference``, and their revocation; the unspent part of grants, and its EXPIRY rows.

The grant that expires first is spent first, and of grants that expire together the oldest. Credits that never expire
are spent last. Open holds keep the part that they need. Credits can be spent until their EXPIRY row exists.
"""

import hashlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import accumulate
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Case, F, OuterRef, Q, QuerySet, Sum, When
from django.db.models.functions import TruncDay

from config.api.pagination import beyond
from config.database.batches import in_order
from config.kernel import clock, money
from config.kernel.errors import Conflict, ValidationFailed
from config.queue import jobs
from credits import ledger, models, statement, sums, usage
from credits.models import CHARGES, STAFF_TYPES, Account, EntryType, LedgerEntry, PendingExpiry

UNSPENT, ALL = "unspent", "all"
ACCOUNTS_BATCH = 500
# The rows at which the order of spending changes: expiring grants, expiries, and revocations of any grant.
MARK = Q(expires_at__isnull=False) | Q(type=EntryType.EXPIRY) | models.REVOCATION


def end_of_grant(text: Any) -> datetime:
    """A time with its zone, at most GRANT_DAYS_MAX days ahead, in UTC, cut to milliseconds. Raises ValueError."""
    moment = clock.moment_of(text, "with its zone, such as 2027-01-31T00:00:00Z")
    if moment > clock.now() + timedelta(days=models.GRANT_DAYS_MAX):
        raise ValueError(f"At most {models.GRANT_DAYS_MAX} days from now.")
    return moment


def grant(
    user_id: int, amount: int, *, reference: str, reason: str, expires_at: datetime | None
) -> tuple[LedgerEntry, bool]:
    """The grant of this reference, with ``balance_after``, and whether it existed. Raises Conflict if it differs."""
    cause = f"reference:{hashlib.sha256(reference.encode()).hexdigest()}"
    given: dict[str, Any] = {"cause": cause, "reference": reference, "reason": reason, "expires_at": expires_at}
    ledger.account_for(user_id)
    try:
        with transaction.atomic():
            account = Account.objects.select_for_update(no_key=True).get(pk=user_id)
            entry = LedgerEntry.objects.filter(cause=cause).first()
            before = entry is not None
            if entry is None:
                if expires_at is not None and expires_at <= clock.now():
                    raise ValidationFailed({"expiresAt": ["The time must be in the future."]})
                price = {"balance": money.to_text(account.balance + amount)}
                entry = ledger.grant(user_id, amount, price=price, **given)
    except IntegrityError:  # the reference was used at the same moment for another user
        entry, before = LedgerEntry.objects.get(cause=cause), True
    if (entry.account_id, entry.amount, entry.expires_at) != (user_id, amount, expires_at):
        raise Conflict("This reference was used for another grant.", details={"ledgerId": entry.pk})
    # The balance of the first answer: concurrent charges can come before the grant in the order of the ledger's rows.
    shown: Any = entry
    shown.balance_after = int(Decimal(entry.price["balance"]) * money.MICRO) if entry.price else balance_after(entry)
    return entry, before


@transaction.atomic
def revoke(given: LedgerEntry, *, reference: str, reason: str, mode: str) -> tuple[dict[str, Any], bool]:
    """``{revoked, balance}`` as decimal text, and whether this reference had revoked the grant before. UNSPENT takes
    what is left of the grant and not held; ALL takes the whole grant, even below zero.
    """
    account = Account.objects.select_for_update(no_key=True).get(pk=given.account_id)
    cause = f"revoke:{given.pk}:{hashlib.sha256(reference.encode()).hexdigest()}"
    entry = LedgerEntry.objects.filter(cause=cause).first()
    before = entry is not None
    if entry is None:
        left = left_of(given, account.balance)
        if mode == ALL:
            # Its revocations and expiries. The types allow an index of the account.
            gone = LedgerEntry.objects.filter(account_id=account.pk, type__in=STAFF_TYPES, against=given)
            amount = given.amount - sum(abs(part) for part in gone.values_list("amount", flat=True))
        else:
            amount = min(left, max(0, account.available))
        price = {"left": left, "balance": money.to_text(account.balance - amount)}
        about: dict[str, Any] = {"cause": cause, "reason": reason, "reference": reference, "price": price}
        entry = ledger.take(EntryType.ADJUSTMENT, account.pk, -amount, against=given, **about)
    recorded: Any = entry.price
    return {"revoked": money.to_text(-entry.amount), "balance": recorded["balance"]}, before


def with_balances(entries: Iterable[Any]) -> Iterator[Any]:
    """``entries`` with ``balance_after``. They belong to one account and come newest first, without gaps. One query."""
    balance: int | None = None
    for entry in entries:
        entry.balance_after = balance_after(entry) if balance is None else balance
        balance = entry.balance_after - statement.effect(entry)
        yield entry


def balance_after(entry: LedgerEntry) -> int:
    """The account's balance after the row, in the order of lists. Charges of later days are read as totals."""
    next_day = usage.midnight(entry.created_at) + usage.DAY
    newer = LedgerEntry.objects.filter(beyond(entry.created_at, entry.pk, ascending=True), account_id=OuterRef("pk"))
    of_day = newer.filter(type__in=CHARGES, created_at__lt=next_day)
    later: QuerySet[Any] = models.DayTotal.objects.filter(account_id=OuterRef("pk"), day__gte=next_day.date())
    charged = sums.sum_by("account_id", of_day, "amount") + sums.sum_by("account_id", later, "amount")
    changed = sums.sum_by("account_id", newer.filter(type__in=STAFF_TYPES), sums.effect("balance"))
    # One statement, so that the rows and the balance belong to the same moment.
    return Account.objects.annotate(after=F("balance") + charged - changed).get(pk=entry.account_id).after


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
            cause = f"expiry:{pending.grant_id}:{part}"
            ledger.take(EntryType.EXPIRY, account_id, amount, cause=cause, against_id=pending.grant_id)
            total += amount
        if amount == left[pending.grant_id]:
            pending.delete()
    return total


def unspent(account_id: int) -> dict[str, int]:
    """The unspent micro-credits of each expiring grant, by grant id. The caller holds the account's lock. Two queries.
    Charges, of which there can be millions, are read as sums: of whole days, and for each mark of its day until then.
    """
    charges = LedgerEntry.objects.filter(account_id=account_id, type__in=CHARGES)
    of_day = charges.filter(created_at__gte=OuterRef("midnight"), created_at__lt=OuterRef("created_at"))
    rows: Any = LedgerEntry.objects.filter(account_id=account_id, type__in=STAFF_TYPES).order_by("created_at", "pk")
    rows = rows.annotate(midnight=TruncDay("created_at", tzinfo=UTC))
    rows = rows.annotate(charged=Case(When(MARK, then=sums.sum_by("account_id", of_day, "amount"))))
    totals = models.DayTotal.objects.filter(account_id=account_id).order_by("day")
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
            left[row.id] = min(change, max(0, balance))  # A grant first covers a negative balance.
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
    revoked = LedgerEntry.objects.filter(models.REVOCATION, account_id=grant.account_id)
    # Revocations of newer grants reduce these grants; the grant's own revocations reduce it.
    own = sums.total(revoked.filter(against=grant))
    others = sums.total(added) + sums.total(revoked.filter(against__in=added.filter(type=EntryType.GRANT)))
    return max(0, min(grant.amount + own, balance - sum(expiring.values()) - others))


def expiring(account_id: int) -> list[dict[str, Any]]:
    """What is left of the expiring grants, summed by time of expiry: ``{amount, at}``, soonest first."""
    pending = dict(PendingExpiry.objects.filter(account_id=account_id).values_list("grant_id", "expires_at"))
    by_time: Counter[datetime] = Counter()
    for grant_id, amount in unspent(account_id).items() if pending else ():
        if grant_id in pending:
            by_time[pending[grant_id]] += amount
    return [{"amount": amount, "at": moment} for moment, amount in sorted(by_time.items()) if amount]
