"""Credits that the app's backend grants for a payment, once per ``reference``, and takes back for a refund."""

import hashlib
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F, OuterRef, QuerySet

from config.api.pagination import beyond
from config.kernel import clock, money
from config.kernel.errors import Conflict, ValidationFailed
from credits import expiry, ledger, statement, sums, usage
from credits.models import CHARGES, GRANT_DAYS_MAX, REVOCATION, STAFF_TYPES, Account, DayTotal, EntryType, LedgerEntry

UNSPENT, ALL = "unspent", "all"


def end_of_grant(text: Any) -> datetime:
    """A time with its zone, at most GRANT_DAYS_MAX days ahead, in UTC, cut to milliseconds. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        moment = moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("Use a time with its zone, such as 2027-01-31T00:00:00Z.") from None
    if moment > clock.now() + timedelta(days=GRANT_DAYS_MAX):
        raise ValueError(f"At most {GRANT_DAYS_MAX} days from now.")
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def grant(
    user_id: int, amount: int, *, reference: str, reason: str, expires_at: datetime | None
) -> tuple[LedgerEntry, bool]:
    """The grant of this reference, with ``balance_after``, and whether it existed. Raises Conflict if it differs."""
    cause = f"reference:{_digest(reference)}"
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
    cause = f"revoke:{given.pk}:{_digest(reference)}"
    entry = LedgerEntry.objects.filter(cause=cause).first()
    before = entry is not None
    if entry is None:
        left = expiry.left_of(given, account.balance)
        if mode == ALL:
            gone = LedgerEntry.objects.filter(REVOCATION, account_id=account.pk, against=given)
            gone |= LedgerEntry.objects.filter(type=EntryType.EXPIRY, against=given)
            amount = given.amount - sum(abs(part) for part in gone.values_list("amount", flat=True))
        else:
            amount = min(left, max(0, account.available))
        price = {"left": left, "balance": money.to_text(account.balance - amount)}
        entry = ledger.revoke(given, amount, cause=cause, reason=reason, reference=reference, price=price)
    recorded: Any = entry.price
    return {"revoked": money.to_text(-entry.amount), "balance": recorded["balance"]}, before


def _digest(reference: str) -> str:
    return hashlib.sha256(reference.encode()).hexdigest()


class Balances:
    """Sets ``balance_after`` of rows of an account, which come newest first without gaps. One query."""

    def __init__(self) -> None:
        self.next: int | None = None

    def give(self, entry: Any) -> Any:
        entry.balance_after = balance_after(entry) if self.next is None else self.next
        self.next = entry.balance_after - statement.effect(entry)
        return entry


def balance_after(entry: LedgerEntry) -> int:
    """The account's balance after the row, in the order of lists. Charges of later days are read as totals."""
    next_day = usage.midnight(entry.created_at) + usage.DAY
    newer = LedgerEntry.objects.filter(beyond(entry.created_at, entry.pk, ascending=True), account_id=OuterRef("pk"))
    of_day = newer.filter(type__in=CHARGES, created_at__lt=next_day)
    later: QuerySet[Any] = DayTotal.objects.filter(account_id=OuterRef("pk"), day__gte=next_day.date())
    charged = sums.sum_by("account_id", of_day, "amount") + sums.sum_by("account_id", later, "amount")
    changed = sums.sum_by("account_id", newer.filter(type__in=STAFF_TYPES), sums.effect("balance"))
    # One statement, so that the rows and the balance belong to the same moment.
    return Account.objects.annotate(after=F("balance") + charged - changed).get(pk=entry.account_id).after
