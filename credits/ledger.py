"""The only writer of accounts and ledger rows. Amounts are micro-credits; no HTTP, no prices, no reports here.

Every function joins the caller's transaction, or runs in one of its own, and is repeatable: a row's ``cause`` is
unique, and a second call with the same cause moves nothing. Balances change by one guarded UPDATE together with the
rows that explain it (``posting.post``), never by read-modify-write. A caller that also locks a run locks the run first.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import BigIntegerField, Case, Exists, F, OuterRef, QuerySet, Subquery, Sum, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, Coalesce

from config.database.queries import CompiledQuery
from config.kernel import clock, money
from config.kernel.errors import Conflict, DomainError, NotFound, ValidationFailed
from credits import figures
from credits.models import REASON_MAX_CHARS, SETTLEMENTS, SPENDING, Account, EntryType, LedgerEntry, PendingExpiry
from credits.posting import Outcome, Settlement, post, row_of, settle

logger = logging.getLogger(__name__)


class InsufficientCredits(DomainError):
    """402 with ``details.available``, a decimal string; the message says it too, for a tool call keeps nothing else."""

    status, code = 402, "INSUFFICIENT_CREDITS"

    def __init__(self, available: int) -> None:
        text = money.to_text(available)
        super().__init__(f"The available credits do not suffice: {text}.", details={"available": text})


# --- accounts --------------------------------------------------------------------------------------------------------
@transaction.atomic
def open_account(user: Any) -> Account:
    """The user's account with SIGNUP_CREDITS granted; a second call changes nothing."""
    now = clock.now()
    Account.objects.bulk_create([Account(user=user, created_at=now, updated_at=now)], ignore_conflicts=True)
    signup = money.parse(settings.SIGNUP_CREDITS, minimum=0, field="SIGNUP_CREDITS")
    if signup:
        grant(user.pk, signup, cause=f"signup:{user.pk}", reason="Sign-up credits")
    return Account.objects.get(pk=user.pk)


_account: CompiledQuery[Account] = CompiledQuery(lambda user_id: Account.objects.filter(pk=user_id), int)


def account_for(user_id: int) -> Account:
    """The user's account, opened on demand for a user that is older than this app."""
    account = _account.first(user_id)
    return account or open_account(get_user_model().objects.get(pk=user_id))


def available(user_id: int) -> int:
    return account_for(user_id).available


def available_subquery() -> Subquery:
    """For querysets of rows that have a user: their available credits, None for one without an account."""
    accounts = Account.objects.filter(pk=OuterRef("user_id")).order_by()
    return Subquery(accounts.annotate(free=F("balance") - F("held")).values("free"))


# --- credits in ------------------------------------------------------------------------------------------------------
@transaction.atomic
def grant(
    user_id: int,
    amount: int,
    *,
    cause: str,
    reason: str = "",
    staff: Any = None,
    expires_at: datetime | None = None,
) -> LedgerEntry:
    """Add credits, once for each ``cause``. What is left of them at ``expires_at`` is taken back."""
    _require(amount > 0, "amount", "A grant must be more than 0.")
    entry = _entry(
        EntryType.GRANT, user_id, amount, cause=cause, reason=_reason(reason), staff=staff, expires_at=expires_at
    )
    recorded = _move(entry, balance=amount)
    if recorded is entry and expires_at is not None:
        PendingExpiry.objects.create(grant=entry, account_id=user_id, expires_at=expires_at)
    return recorded


@transaction.atomic
def adjust(user_id: int, amount: int, *, reason: str, staff: Any, cause: str | None = None) -> LedgerEntry:
    """Correct an account up or down, even below zero. Give a ``cause`` where the call may be repeated."""
    _require(amount != 0, "amount", "An adjustment must not be 0.")
    entry = _entry(EntryType.ADJUSTMENT, user_id, amount, **_correction(reason, staff))
    entry.cause = cause or f"adjustment:{entry.id}"
    return _move(entry, balance=amount)


@transaction.atomic
def refund(entry_id: str, amount: int, *, reason: str, staff: Any, cause: str | None = None) -> LedgerEntry:
    """Give back (part of) a CAPTURE or USAGE row; all refunds of a row together are at most its amount, else Conflict.

    Give a ``cause`` where the call may be repeated.
    """
    _require(amount > 0, "amount", "A refund must be more than 0.")
    spent = LedgerEntry.objects.filter(pk=entry_id, type__in=[EntryType.CAPTURE, EntryType.USAGE]).first()
    if spent is None:
        raise NotFound("Only a CAPTURE or USAGE row can be refunded.")
    # Refunds of one row are weighed one after the other; staff's work is too rare for the wait to matter.
    Account.objects.select_for_update().get(pk=spent.account_id)
    repeated = LedgerEntry.objects.filter(cause=cause).first() if cause else None
    if repeated is not None:
        return repeated
    earlier = _sum(LedgerEntry.objects.filter(against=spent, type=EntryType.REFUND))
    if earlier + amount > spent.amount:
        raise Conflict(f"At most {money.to_text(spent.amount - earlier)} credits of this row can still be refunded.")
    entry = _entry(
        EntryType.REFUND,
        spent.account_id,
        amount,
        against=spent,
        tool_key=spent.tool_key,
        chat_id=spent.chat_id,
        run_id=spent.run_id,
        invocation_id=spent.invocation_id,
        **_correction(reason, staff),
    )
    entry.cause = cause or f"refund:{entry.id}"
    return _move(entry, balance=amount)


# --- credits out -----------------------------------------------------------------------------------------------------
def hold(
    user_id: int, amount: int, *, invocation_id: str, tool_key: str, chat_id: str, run_id: str, price: dict[str, Any]
) -> LedgerEntry | None:
    """Set the estimate of a tool call aside; None for 0, which moves nothing.

    Raises InsufficientCredits, with nothing changed, when available would go below zero.
    """
    _require(amount >= 0, "amount", "A hold must not be negative.")
    if amount == 0:
        return None
    entry = _entry(
        EntryType.HOLD,
        user_id,
        amount,
        cause=f"hold:{invocation_id}",
        tool_key=tool_key,
        chat_id=chat_id,
        run_id=run_id,
        invocation_id=invocation_id,
        price=price,
    )
    outcome = _post(entry, held=amount, covered=True)
    if outcome is Outcome.REFUSED:
        raise InsufficientCredits(available(user_id))
    return entry if outcome is Outcome.MOVED else LedgerEntry.objects.get(cause=entry.cause)


def capture(invocation_id: str, amount: int) -> int:
    """Take a call's actual cost out of its hold and release the rest.

    Returns what was captured: at most the hold, and 0 without an open one.
    """
    _require(amount >= 0, "amount", "A capture must not be negative.")
    settlement = _settle(f"hold:{invocation_id}", amount)
    if settlement is None or settlement.outcome is not Outcome.MOVED:
        return 0
    if amount > settlement.held:
        asked, most = money.to_text(amount), money.to_text(settlement.held)
        logger.warning("capture of %s for %s is over its hold: clamped to %s", asked, invocation_id, most)
    return settlement.captured


def release(invocation_id: str) -> None:
    """Give a call's whole hold back; nothing without an open hold."""
    _settle(f"hold:{invocation_id}", 0)


def _open_holds_of(run_id: str) -> QuerySet[LedgerEntry]:
    # Settled ones are left out to save the work: their cause would not let them be settled again.
    settled = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS)
    return LedgerEntry.objects.filter(~Exists(settled), run_id=run_id, type=EntryType.HOLD)


_open_holds: CompiledQuery[LedgerEntry] = CompiledQuery(_open_holds_of, str)


def release_run(run_id: str) -> int:
    """Release every open hold of a run that ends. Returns how many credits (micro) were given back."""
    with transaction.atomic():
        settlements = [_settle(hold.cause, 0) for hold in _open_holds(run_id)]
    return sum(each.held for each in settlements if each and each.outcome is Outcome.MOVED)


def usage(
    user_id: int, amount: int, *, run_id: str, chat_id: str, turn_index: int, price: dict[str, Any]
) -> LedgerEntry:
    """Book one model turn, once; 0 is booked too. The turn has happened, so the balance may go below zero."""
    _require(amount >= 0, "amount", "Usage must not be negative.")
    cause = f"usage:{run_id}:{turn_index}"
    entry = _entry(EntryType.USAGE, user_id, amount, cause=cause, chat_id=chat_id, run_id=run_id, price=price)
    return _move(entry, balance=-amount)


def expire(pending: PendingExpiry, amount: int, part: int) -> None:
    """Take back ``amount`` of a grant; ``part`` counts the earlier times. For ``expiry.py``, which knows how much."""
    cause = f"expiry:{pending.grant_id}:{part}"
    entry = _entry(EntryType.EXPIRY, pending.account_id, amount, cause=cause, against_id=pending.grant_id)
    _move(entry, balance=-amount)


# --- what a run took -------------------------------------------------------------------------------------------------
def run_spent(run_id: str) -> int:
    """Captures and usage less refunds."""
    return _sum(LedgerEntry.objects.filter(run_id=run_id, type__in=SPENDING), net_spending())


def run_held(run_id: str) -> int:
    """The run's open holds."""
    rows = LedgerEntry.objects.filter(run_id=run_id, type__in=[EntryType.HOLD, *SETTLEMENTS])
    return _sum(rows, _signed(plus=[EntryType.HOLD]))


def would_exceed(run_id: str, limit: int, amount: int) -> bool:
    """Whether spent + held + amount is over ``limit``.

    The caller holds the run's lock, else two calls may pass side by side.
    """
    # A capture moves its amount from held to spent, so it cancels out of the sum.
    rows = LedgerEntry.objects.filter(run_id=run_id).exclude(type=EntryType.CAPTURE)
    return _sum(rows, _signed(plus=[EntryType.HOLD, EntryType.USAGE])) + amount > limit


def run_spent_subquery(outer: str = "pk") -> Combinable:
    """``run_spent`` as an expression for a queryset of runs; ``outer`` names the column with the run's id."""
    rows = LedgerEntry.objects.filter(run_id=OuterRef(outer), type__in=SPENDING).order_by()
    total = rows.values("run_id").annotate(total=Sum(net_spending())).values("total")
    return Cast(Coalesce(Subquery(total), Value(0)), BigIntegerField())


def net_spending() -> Combinable:
    """A row's share in what was spent: a refund counts against it."""
    return _signed(plus=[EntryType.CAPTURE, EntryType.USAGE])


# --- inside ----------------------------------------------------------------------------------------------------------
def _signed(plus: list[EntryType]) -> Combinable:
    return Case(When(type__in=plus, then=F("amount")), default=-F("amount"), output_field=BigIntegerField())


def _sum(rows: QuerySet[LedgerEntry], expression: Combinable | None = None) -> int:
    # The sum of a bigint is a numeric on PostgreSQL, hence the cast.
    total = Cast(Coalesce(Sum(F("amount") if expression is None else expression), Value(0)), BigIntegerField())
    return rows.order_by().aggregate(total=total)["total"]


def _settle(hold_cause: str, amount: int) -> Settlement | None:
    settlement = settle(hold_cause, amount)
    if settlement and settlement.outcome is Outcome.REFUSED:
        raise RuntimeError(f"an account holds less than its open hold {hold_cause}")
    if settlement and settlement.captured:
        figures.spend(settlement.tool_key, settlement.captured)
    return settlement


def _entry(type: EntryType, user_id: int, amount: int, **fields: Any) -> LedgerEntry:
    largest = money.to_text(money.MAX_MICRO)
    _require(abs(amount) <= money.MAX_MICRO, "amount", f"At most {largest} credits can be moved at once.")
    return LedgerEntry(type=type, account_id=user_id, amount=amount, created_at=clock.now(), **fields)


def _move(entry: LedgerEntry, *, balance: int) -> LedgerEntry:
    outcome = _post(entry, balance=balance)
    if outcome is Outcome.REFUSED:
        raise Conflict("The account's balance would leave the range that it can hold.")
    return entry if outcome is Outcome.MOVED else LedgerEntry.objects.get(cause=entry.cause)


def _post(row: LedgerEntry, *, balance: int = 0, held: int = 0, covered: bool = False) -> Outcome:
    outcome = post([row_of(row)], balance=balance, held=held, covered=covered)
    if outcome is Outcome.REFUSED and not Account.objects.filter(pk=row.account_id).exists():
        account_for(row.account_id)
        outcome = post([row_of(row)], balance=balance, held=held, covered=covered)
    if outcome is Outcome.MOVED and row.type == EntryType.USAGE:
        figures.spend(row.tool_key, row.amount)
    return outcome


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise ValidationFailed({field: [message]}, message)


def _correction(reason: str, staff: Any) -> dict[str, Any]:
    """What a row by staff keeps: why, and who."""
    _require(bool(reason.strip()), "reason", "A reason is required.")
    _require(staff is not None and staff.is_staff, "staff", "A member of staff is required.")
    return {"reason": _reason(reason), "staff": staff}


def _reason(text: str) -> str:
    text = text.strip()
    _require(len(text) <= REASON_MAX_CHARS, "reason", f"A reason may have at most {REASON_MAX_CHARS} characters.")
    _require("\0" not in text, "reason", "A reason must not hold a NUL character.")
    return text
