"""The only writer of accounts and ledger rows. Amounts are micro-credits; no HTTP, no prices, no reports here.

Every function joins the caller's transaction or opens its own. Every function can be repeated: the ``cause`` of a row
is unique, and a second call with the same cause moves nothing. One guarded UPDATE changes the account, in the
transaction that inserts the rows (``_post``). A movement of a run needs that run's lock, which the caller takes first:
without it, two calls with one cause at the same moment move it once, and one of them raises IntegrityError.
"""

from __future__ import annotations

import logging
from datetime import datetime
from enum import Enum
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import connection, transaction
from django.db.models import BigIntegerField, Case, Exists, F, OuterRef, QuerySet, Subquery, Sum, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from config.database.queries import CompiledQuery
from config.database.writes import Writes
from config.kernel import clock, money
from config.kernel.errors import Conflict, DomainError, NotFound, ValidationFailed
from credits import metrics
from credits.models import (
    BALANCE_LIMIT,
    REASON_MAX_CHARS,
    SETTLEMENTS,
    SPENDING,
    Account,
    EntryType,
    LedgerEntry,
    PendingExpiry,
)

logger = logging.getLogger(__name__)


class Outcome(Enum):
    MOVED = "moved"
    REPEATED = "repeated"  # a row with this cause exists
    REFUSED = "refused"  # the account's balance, held or available would leave its range


class InsufficientCredits(DomainError):
    """402 with ``details.available``, a decimal string. A tool call stores only the message, which repeats it."""

    status, code = 402, "INSUFFICIENT_CREDITS"

    def __init__(self, available: int) -> None:
        text = money.to_text(available)
        super().__init__(f"The available credits do not suffice: {text}.", details={"available": text})


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
    """The user's account. A user that is older than this app has none yet: it is opened here."""
    return _account.first(user_id) or open_account(get_user_model().objects.get(pk=user_id))


def available(user_id: int) -> int:
    return account_for(user_id).available


def available_subquery() -> Subquery:
    """The available credits of a row's ``user_id``; None without an account."""
    accounts = Account.objects.filter(pk=OuterRef("user_id")).order_by()
    return Subquery(accounts.annotate(free=F("balance") - F("held")).values("free"))


@transaction.atomic
def grant(
    user_id: int, amount: int, *, cause: str, reason: str = "", staff: Any = None, expires_at: datetime | None = None
) -> LedgerEntry:
    """Add credits, once for each ``cause``. The unspent part expires at ``expires_at``."""
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
    """Correct an account up or down, even below zero. Pass a ``cause`` if the call may be repeated."""
    _require(amount != 0, "amount", "An adjustment must not be 0.")
    entry = _entry(EntryType.ADJUSTMENT, user_id, amount, **_correction(reason, staff))
    entry.cause = cause or f"adjustment:{entry.id}"
    return _move(entry, balance=amount)


@transaction.atomic
def refund(entry_id: str, amount: int, *, reason: str, staff: Any, cause: str | None = None) -> LedgerEntry:
    """Refund a part or all of a CAPTURE or USAGE row. Raises Conflict if its refunds would exceed its amount.

    Pass a ``cause`` if the call may be repeated.
    """
    _require(amount > 0, "amount", "A refund must be more than 0.")
    spent = LedgerEntry.objects.filter(pk=entry_id, type__in=[EntryType.CAPTURE, EntryType.USAGE]).first()
    if spent is None:
        raise NotFound("Only a CAPTURE or USAGE row can be refunded.")
    # The lock serializes the refunds of one row.
    Account.objects.select_for_update(no_key=True).get(pk=spent.account_id)
    repeated = LedgerEntry.objects.filter(cause=cause).first() if cause else None
    if repeated is not None:
        return repeated
    earlier = _sum(LedgerEntry.objects.filter(against=spent, type=EntryType.REFUND), F("amount"))
    if earlier + amount > spent.amount:
        raise Conflict(f"At most {money.to_text(spent.amount - earlier)} credits of this row can still be refunded.")
    entry = _entry(
        EntryType.REFUND, spent.account_id, amount, against=spent, **_subject(spent), **_correction(reason, staff)
    )
    entry.cause = cause or f"refund:{entry.id}"
    return _move(entry, balance=amount)


def hold(
    user_id: int, amount: int, *, invocation_id: str, tool_key: str, chat_id: str, run_id: str, price: dict[str, Any]
) -> LedgerEntry | None:
    """Hold the estimate of a tool call. Returns None for 0, which moves nothing.

    Raises InsufficientCredits, without any change, if available would go below zero.
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
    outcome = _post([entry], held=amount, covered=True)
    if outcome is Outcome.REFUSED:
        raise InsufficientCredits(available(user_id))
    return entry if outcome is Outcome.MOVED else LedgerEntry.objects.get(cause=entry.cause)


def capture(invocation_id: str, amount: int) -> int:
    """Capture the actual cost of a tool call from its hold and release the rest.

    Returns the captured amount: at most the hold, and 0 without an open hold.
    """
    _require(amount >= 0, "amount", "A capture must not be negative.")
    hold = _hold_with_cause.first(f"hold:{invocation_id}")
    if hold is None or not _settle(hold, amount):
        return 0
    if amount > hold.amount:
        asked, most = money.to_text(amount), money.to_text(hold.amount)
        logger.warning("capture of %s for %s exceeds its hold: clamped to %s", asked, invocation_id, most)
    return min(amount, hold.amount)


def release(invocation_id: str) -> None:
    """Release the whole hold of a tool call. Does nothing without an open hold."""
    hold = _hold_with_cause.first(f"hold:{invocation_id}")
    if hold is not None:
        _settle(hold, 0)


def _open_holds_of(run_id: str) -> QuerySet[LedgerEntry]:
    # Settled holds could not be settled again; to leave them out saves statements.
    settled = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS)
    return LedgerEntry.objects.filter(~Exists(settled), run_id=run_id, type=EntryType.HOLD)


_open_holds: CompiledQuery[LedgerEntry] = CompiledQuery(_open_holds_of, str)


def release_run(run_id: str) -> int:
    """Release every open hold of a run that ends. Returns the released micro-credits."""
    with transaction.atomic():
        return sum(hold.amount for hold in _open_holds(run_id) if _settle(hold, 0))


def usage(
    user_id: int, amount: int, *, run_id: str, chat_id: str, turn_index: int, price: dict[str, Any]
) -> LedgerEntry:
    """Charge one model turn, once; 0 is recorded too. The turn is over, so the balance may go below zero."""
    _require(amount >= 0, "amount", "Usage must not be negative.")
    cause = f"usage:{run_id}:{turn_index}"
    entry = _entry(EntryType.USAGE, user_id, amount, cause=cause, chat_id=chat_id, run_id=run_id, price=price)
    recorded = _move(entry, balance=-amount)
    if recorded is entry:
        metrics.spend(None, amount)
    return recorded


def expire(pending: PendingExpiry, amount: int, part: int) -> None:
    """Expire ``amount`` of a grant. ``part`` is the number of its earlier EXPIRY rows. For ``expiry.py`` only."""
    cause = f"expiry:{pending.grant_id}:{part}"
    entry = _entry(EntryType.EXPIRY, pending.account_id, amount, cause=cause, against_id=pending.grant_id)
    _move(entry, balance=-amount)


def run_spent(run_id: str) -> int:
    """Captures and usage less refunds."""
    return _sum(LedgerEntry.objects.filter(run_id=run_id, type__in=SPENDING), net_spending())


def would_exceed(run_id: str, limit: int, amount: int) -> bool:
    """Whether spent + held + amount exceeds ``limit``.

    The caller holds the run's lock; without it two concurrent calls could both pass.
    """
    # A capture moves its amount from held to spent, so the sum does not need it.
    rows = LedgerEntry.objects.filter(run_id=run_id).exclude(type=EntryType.CAPTURE)
    return _sum(rows, _signed(plus=[EntryType.HOLD, EntryType.USAGE])) + amount > limit


def run_spent_subquery(outer: str = "pk") -> Combinable:
    """``run_spent`` as an expression for a queryset; ``outer`` is the column that holds the run's id."""
    rows = LedgerEntry.objects.filter(run_id=OuterRef(outer), type__in=SPENDING).order_by()
    total = rows.values("run_id").annotate(total=Sum(net_spending())).values("total")
    return Coalesce(Subquery(total), Value(0))


def net_spending() -> Combinable:
    """The signed amount of a SPENDING row: a refund is negative."""
    return _signed(plus=[EntryType.CAPTURE, EntryType.USAGE])


def _signed(plus: list[EntryType]) -> Combinable:
    return Case(When(type__in=plus, then=F("amount")), default=-F("amount"), output_field=BigIntegerField())


def _sum(rows: QuerySet[LedgerEntry], amount: Combinable) -> int:
    return rows.order_by().aggregate(total=Sum(amount, default=0))["total"]


_hold_with_cause: CompiledQuery[LedgerEntry] = CompiledQuery(lambda cause: LedgerEntry.objects.filter(cause=cause), str)


def _settle(hold: LedgerEntry, amount: int) -> bool:
    """Capture ``amount`` of a hold, at most all of it, and release the rest. False if it was settled before."""
    captured = min(amount, hold.amount)
    cause = f"settle:{hold.id}"
    common = {"account_id": hold.account_id, "against_id": hold.id, "created_at": clock.now(), **_subject(hold)}
    rows = []
    if captured:
        rows.append(LedgerEntry(type="CAPTURE", amount=captured, cause=cause, price=hold.price, **common))
    if captured < hold.amount:
        rest = f"{cause}:rest" if captured else cause
        rows.append(LedgerEntry(type="RELEASE", amount=hold.amount - captured, cause=rest, **common))
    outcome = _post(rows, balance=-captured, held=-hold.amount)
    if outcome is Outcome.REFUSED:
        raise RuntimeError(f"an account holds less than its open hold {hold.cause}")
    if outcome is Outcome.MOVED:
        metrics.spend(hold.tool_key, captured)
    return outcome is Outcome.MOVED


def _subject(entry: LedgerEntry) -> dict[str, Any]:
    """What a row that settles or refunds ``entry`` copies from it."""
    return {name: getattr(entry, name) for name in ("tool_key", "chat_id", "run_id", "invocation_id")}


def _entry(type: EntryType, user_id: int, amount: int, **fields: Any) -> LedgerEntry:
    largest = money.to_text(money.MAX_MICRO)
    _require(abs(amount) <= money.MAX_MICRO, "amount", f"At most {largest} credits can be moved at once.")
    return LedgerEntry(type=type, account_id=user_id, amount=amount, created_at=clock.now(), **fields)


def _move(entry: LedgerEntry, *, balance: int) -> LedgerEntry:
    outcome = _post([entry], balance=balance)
    if outcome is Outcome.REFUSED:
        raise Conflict("The account's balance would leave the range that it can hold.")
    return entry if outcome is Outcome.MOVED else LedgerEntry.objects.get(cause=entry.cause)


_locked_account: CompiledQuery[Account] = CompiledQuery(
    lambda user_id: Account.objects.select_for_update(no_key=True).filter(pk=user_id), int
)
_CHANGE_ACCOUNT = """
    UPDATE credits_account SET balance = balance + %s, held = held + %s, updated_at = %s
     WHERE user_id = %s AND held + %s >= 0 AND balance + %s BETWEEN %s AND %s
       AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = %s)
"""
_COVERED = " AND balance + %s >= held + %s"


def _post(rows: list[LedgerEntry], *, balance: int = 0, held: int = 0, covered: bool = False) -> Outcome:
    """Insert ``rows``, all of one account, and add ``balance`` and ``held`` to the account.

    The cause of the first row decides whether the call is a repetition. With ``covered``, available must not go below
    zero. Nothing is written unless the outcome is MOVED.
    """
    user_id, cause = rows[0].account_id, rows[0].cause
    now = connection.ops.adapt_datetimefield_value(rows[0].created_at)
    values = [balance, held, now, user_id, held, balance, -BALANCE_LIMIT, BALANCE_LIMIT, cause]
    writes = Writes()
    if covered:
        writes.execute(_CHANGE_ACCOUNT + _COVERED, [*values, balance, held])
    else:
        writes.execute(_CHANGE_ACCOUNT, values)
    writes.insert(*rows)
    with transaction.atomic(savepoint=False):
        if rows[0].run_id is None:
            # A concurrent transaction may insert the same cause while this one waits for the account; only a statement
            # that starts after the wait sees that row. The movements of a run need no such wait: their callers hold
            # the run's lock.
            _locked_account.first(user_id)
        while not writes.do():
            if LedgerEntry.objects.filter(cause=cause).exists():
                return Outcome.REPEATED
            if Account.objects.filter(pk=user_id).exists():
                return Outcome.REFUSED
            account_for(user_id)
        return Outcome.MOVED


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise ValidationFailed({field: [message]}, message)


def _correction(reason: str, staff: Any) -> dict[str, Any]:
    """The fields of a row that staff cause."""
    _require(bool(reason.strip()), "reason", "A reason is required.")
    _require(staff is not None and staff.is_staff, "staff", "A member of staff is required.")
    return {"reason": _reason(reason), "staff": staff}


def _reason(text: str) -> str:
    text = text.strip()
    _require(len(text) <= REASON_MAX_CHARS, "reason", f"A reason may have at most {REASON_MAX_CHARS} characters.")
    _require("\0" not in text, "reason", "A reason must not hold a NUL character.")
    return text
