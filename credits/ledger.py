"""The only writer of accounts and ledger rows. Amounts are micro-credits. No HTTP, prices or reports here.

Every function joins the caller's transaction or opens its own. One guarded UPDATE changes the account, in the
transaction that inserts the rows (``_post``). The ``cause`` of a row is unique: a second call with it moves nothing.
For a movement of a run, the caller must first lock the run: otherwise, of two simultaneous calls with one cause, one
moves the credits and the other raises IntegrityError.
"""

import contextlib
import logging
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import connection, transaction

from config.database.batches import in_order
from config.database.queries import CompiledQuery
from config.database.writes import Writes
from config.kernel import clock, money
from config.kernel.errors import Conflict, DomainError, NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id
from config.queue import jobs
from config.telemetry.metrics import Counter
from credits import models, sums
from credits.models import BALANCE_LIMIT, REASON_MAX_CHARS, Account, EntryType, LedgerEntry, PendingExpiry
from webhooks import outbox
from webhooks.events import CreditsEvent

LOW_BATCH = 100

logger = logging.getLogger(__name__)
# For monitoring only. Refunds are not subtracted: a counter only grows.
_spent = Counter("credits_spent", "Credits captured for tools and used by models.", ["tool"])
_turns_over_hold = Counter(
    "credits_turns_over_hold", "Model turns that cost more than their hold, up to which they were charged."
)


class InsufficientCredits(DomainError):
    """402 with ``details.available``, a decimal string, and ``details.topUpUrl`` or null."""

    status, code = 402, "INSUFFICIENT_CREDITS"

    def __init__(self, available: int, username: str | None = None) -> None:
        text = money.to_text(available)
        details = {"available": text, "topUpUrl": top_up_url(username)}
        super().__init__(f"There are not enough credits: {text} available.", details=details)


def top_up_url(username: str | None) -> str | None:
    """The address where the user buys credits, from TOP_UP_URL; None if there is none."""
    if not settings.TOP_UP_URL or username is None:
        return None
    return settings.TOP_UP_URL.replace("{userId}", quote(username, safe=""))


@transaction.atomic
def open_account(user: Any) -> Account:
    """The user's account with SIGNUP_CREDITS granted, unless it is a staff account; a second call changes nothing."""
    now = clock.now()
    Account.objects.bulk_create([Account(user=user, created_at=now, updated_at=now)], ignore_conflicts=True)
    signup = money.parse(settings.SIGNUP_CREDITS, minimum=0, field="SIGNUP_CREDITS")
    if signup and not (user.is_staff or user.is_superuser):
        grant(user.pk, signup, cause=f"signup:{user.pk}", reason="Sign-up credits", is_first=True)
    return Account.objects.get(pk=user.pk)


_account: CompiledQuery[Account] = CompiledQuery(lambda user_id: Account.objects.filter(pk=user_id), int)


def account_for(user_id: int) -> Account:
    """The user's account. It is opened here for a user who is older than this app."""
    return _account.first(user_id) or open_account(get_user_model().objects.get(pk=user_id))


@transaction.atomic
def grant(
    user_id: int, amount: int, *, cause: str, reason: str = "", is_first: bool = False, **fields: Any
) -> LedgerEntry:
    """Add credits, once for each ``cause``. ``is_first``: no run can wait for them. ``fields``: the row's others."""
    _require(amount > 0, "amount", "A grant must be more than 0.")
    entry = _entry(EntryType.GRANT, user_id, amount, cause=cause, reason=_reason(reason), **fields)
    recorded = _move(entry)
    if recorded is entry:
        if not is_first:
            models.credits_added.send(LedgerEntry, user_id=user_id)
        if entry.expires_at is not None:
            PendingExpiry.objects.create(grant=entry, account_id=user_id, expires_at=entry.expires_at)
        given = {"ledgerId": entry.pk, "reference": entry.reference, "amount": money.to_number(amount)}
        outbox.report_credits(user_id, CreditsEvent.GRANTED, given)
    return recorded


@transaction.atomic
def adjust(user_id: int, amount: int, *, reason: str, staff: Any, cause: str | None = None) -> LedgerEntry:
    """Correct an account up or down, even below zero. Pass a ``cause`` if the call may be repeated."""
    _require(amount != 0, "amount", "An adjustment must not be 0.")
    entry = _entry(EntryType.ADJUSTMENT, user_id, amount, cause=cause, **_correction(reason, staff))
    models.credits_added.send(LedgerEntry, user_id=user_id)
    return _move(entry)


def take(type: EntryType, user_id: int, amount: int, *, reason: str = "", **fields: Any) -> LedgerEntry:
    """Revoke or expire a grant or a part of it. The caller holds the account's lock. For ``grants.py`` only."""
    return _move(_entry(type, user_id, amount, reason=_reason(reason), **fields))


@transaction.atomic
def refund(entry_id: str, amount: int, *, reason: str, staff: Any, cause: str | None = None) -> LedgerEntry:
    """Refund a charge or a part of it, once for each ``cause``. Raises Conflict above the charged amount."""
    _require(amount > 0, "amount", "A refund must be more than 0.")
    spent = LedgerEntry.objects.filter(pk=entry_id).first() if is_plausible_id(entry_id) else None
    if spent is None:
        raise NotFound(f"There is no row {entry_id[:40]} of the ledger.")
    if not spent.is_charge:
        raise NotFound("Only a CAPTURE or USAGE row can be refunded.")
    # The lock serializes the refunds of one row.
    Account.objects.select_for_update(no_key=True).get(pk=spent.account_id)
    if cause and (repeated := LedgerEntry.objects.filter(cause=cause).first()) is not None:
        return repeated
    if amount > (most := sums.refundable(spent)):
        raise Conflict(f"At most {money.to_text(most)} credits of this row can still be refunded.")
    about = _subject(spent) | _correction(reason, staff)
    entry = _entry(EntryType.REFUND, spent.account_id, amount, cause=cause, against=spent, **about)
    models.credits_added.send(LedgerEntry, user_id=spent.account_id)
    return _move(entry)


def hold(
    user_id: int, amount: int, *, run_id: str, cause: str | None = None, guards: Writes | None = None, **about: Any
) -> LedgerEntry | None:
    """Hold the estimate of a tool call, or, with a ``cause``, the most that a request to a model can cost. ``about``:
    the price, ``chat_id`` and, of a call, ``invocation_id`` and ``tool_key``. Returns None for 0; a repeated call
    returns the first hold. Raises InsufficientCredits, without a change, if too little is available or a guard fails.
    """
    _require(amount >= 0, "amount", "A hold must not be negative.")
    if amount == 0:
        return None
    cause = cause or f"hold:{about['invocation_id']}"
    recorded = _post([_entry(EntryType.HOLD, user_id, amount, cause=cause, run_id=run_id, **about)], guards)
    if recorded is None:
        raise InsufficientCredits(account_for(user_id).available)
    return recorded


def hold_of(invocation_id: str) -> LedgerEntry | None:
    """The hold of a tool call, also after it was settled."""
    return LedgerEntry.objects.filter(cause=f"hold:{invocation_id}").first()


def capture(invocation_id: str, amount: int) -> bool:
    """``settle`` for a tool call; False also without a hold."""
    hold = hold_of(invocation_id)
    return hold is not None and settle(hold, amount)


def settle(hold: LedgerEntry, amount: int, price: dict[str, Any] | None = None) -> bool:
    """Charge ``amount`` of a hold, at most all of it, and release the rest. False if the hold was settled before. The
    charge of a tool call is a CAPTURE. With a ``price``, it is the charge of a request to a model: a USAGE, even of 0.
    """
    rows = _settlement(hold, amount, price)
    recorded = _post(rows)
    if recorded is None:
        raise RuntimeError(f"an account holds less than its open hold {hold.cause}")
    if recorded is rows[0]:
        _settled(hold, amount)
    return recorded is rows[0]


def settle_with(guards: Writes, also: Writes, hold: LedgerEntry, amount: int, price: dict[str, Any]) -> None:
    """``settle`` as a part of other writes. A repetition makes a guard fail, so that none of the writes happens."""
    rows = _settlement(hold, amount, price)
    guards.execute(*_movement(rows), lambda: _settled(hold, amount))
    also.insert(*rows)


def _settled(hold: LedgerEntry, amount: int) -> None:
    if charged := min(amount, hold.amount):
        transaction.on_commit(partial(_spent.labels(hold.tool_key or "model").inc, charged / money.MICRO), robust=True)
    if amount > hold.amount:
        subject, asked, most = hold.invocation_id or hold.run_id, money.to_text(amount), money.to_text(hold.amount)
        logger.warning("a step of %s cost %s, more than its hold: %s is charged", subject, asked, most)
        if hold.tool_key is None:
            transaction.on_commit(_turns_over_hold.inc, robust=True)


def _settlement(hold: LedgerEntry, amount: int, price: dict[str, Any] | None) -> list[LedgerEntry]:
    """The rows that settle a hold. The first one's cause names the hold, so that no hold is settled twice."""
    _require(amount >= 0, "amount", "A charge must not be negative.")
    charged = min(amount, hold.amount)
    common = {"account_id": hold.account_id, "against_id": hold.id, "created_at": clock.now(), **_subject(hold)}
    rows, settle = [], f"settle:{hold.id}"
    if price is not None:
        rows.append(LedgerEntry(type="USAGE", amount=charged, cause=settle, price=price, **common))
    elif charged:
        rows.append(LedgerEntry(type="CAPTURE", amount=charged, cause=settle, price=hold.price, **common))
    if charged < hold.amount:
        rest = f"{settle}:rest" if rows else settle
        rows.append(LedgerEntry(type="RELEASE", amount=hold.amount - charged, cause=rest, **common))
    return rows


def _subject(entry: LedgerEntry) -> dict[str, Any]:
    """The columns that a row copies from the ``entry`` that it settles or refunds."""
    return {name: getattr(entry, name) for name in ("tool_key", "chat_id", "run_id", "invocation_id")}


def _entry(type: EntryType, user_id: int, amount: int, *, cause: str | None, **fields: Any) -> LedgerEntry:
    largest = money.to_text(money.MAX_MICRO)
    _require(abs(amount) <= money.MAX_MICRO, "amount", f"At most {largest} credits can be moved at once.")
    entry = LedgerEntry(type=type, account_id=user_id, amount=amount, created_at=clock.now(), **fields)
    entry.cause = cause or f"{type.lower()}:{entry.id}"
    return entry


def _move(entry: LedgerEntry) -> LedgerEntry:
    recorded = _post([entry])
    if recorded is None:
        raise Conflict("The account's balance would leave the range that it can hold.")
    return recorded


def _post(rows: list[LedgerEntry], guards: Writes | None = None) -> LedgerEntry | None:
    """Insert ``rows``, all of one account, and change the account by them. Returns the first row or, if one with its
    cause exists, that row; then nothing is written. None, and nothing is written, if the account's balance, held or
    available would leave its range, or if one of ``guards`` finds no row.
    """
    user_id, cause = rows[0].account_id, rows[0].cause
    writes = guards or Writes()
    writes.execute(*_movement(rows))
    writes.guards = len(writes.statements)
    writes.insert(*rows)
    # A BEGIN and a COMMIT around one statement would be two more round trips.
    alone = rows[0].run_id is not None and writes.are_one_statement()
    with contextlib.nullcontext() if alone else transaction.atomic(savepoint=False):
        if rows[0].run_id is None:
            # A concurrent transaction may insert the same cause while this one waits for the account; only a statement
            # that starts after the wait sees that row. Movements of a run need no such wait, because their callers hold
            # the run's lock.
            Account.objects.select_for_update(no_key=True).filter(pk=user_id).first()
        while not writes.do():
            if (repeated := LedgerEntry.objects.filter(cause=cause).first()) is not None:
                return repeated
            if Account.objects.filter(pk=user_id).exists():
                return None
            account_for(user_id)
        return rows[0]


# Staff may take available below zero; the part below zero is the debt.
_CHANGE_ACCOUNT = """
    UPDATE credits_account SET balance = balance + %s, held = held + %s, updated_at = %s,
           debt = CASE WHEN balance + %s >= held + %s THEN 0 WHEN %s THEN held + %s - balance - %s ELSE debt END,
           low_due = low_due{crossed}
     WHERE user_id = %s AND held + %s >= 0 AND balance + %s BETWEEN %s AND %s
       AND NOT EXISTS (SELECT 1 FROM credits_ledgerentry WHERE cause = %s)
"""
# Sets one bit for each threshold that the balance falls below, so that no charge waits for an event (``report_low``).
_CROSSED = " | (CASE WHEN balance >= {0} AND balance + %s < {0} THEN {1} ELSE 0 END)"
_thresholds = lru_cache(maxsize=8)(money.parse_list)


def _movement(rows: list[LedgerEntry]) -> tuple[str, list[Any]]:
    """The one UPDATE that changes an account, and its values."""
    first = rows[0]
    balance = sum(EntryType[row.type].balance * row.amount for row in rows)
    held = sum(EntryType[row.type].held * row.amount for row in rows)
    thresholds = _thresholds(settings.CREDITS_LOW_THRESHOLDS)
    crossed = "".join(_CROSSED.format(threshold, 1 << bit) for bit, threshold in enumerate(thresholds))
    now = connection.ops.adapt_datetimefield_value(first.created_at)
    values: list[Any] = [balance, held, now, balance, held, first.type == EntryType.ADJUSTMENT, held, balance]
    values += [balance for _ in thresholds]
    values += [first.account_id, held, balance, -BALANCE_LIMIT, BALANCE_LIMIT, first.cause]
    statement = _CHANGE_ACCOUNT.format(crossed=crossed)
    if first.type == EntryType.HOLD:  # only a hold must be covered by what is available
        statement, values = f"{statement} AND balance + %s >= held + %s", [*values, balance, held]
    return statement, values


def report_low() -> int:
    """Report to the installation endpoint each fall of a balance below a threshold. Returns the number of accounts."""
    marked = Account.objects.exclude(low_due=0)
    return sum(jobs.each("sweep-low-credits", in_order(marked, "pk", LOW_BATCH), _report_low))


@transaction.atomic
def _report_low(user_id: int) -> bool:
    """False if another sweep was faster."""
    account = Account.objects.select_for_update(no_key=True).get(pk=user_id)
    for bit, threshold in enumerate(_thresholds(settings.CREDITS_LOW_THRESHOLDS)):
        if account.low_due >> bit & 1:
            about = {"available": money.to_number(account.available), "threshold": money.to_number(threshold)}
            outbox.report_credits(user_id, CreditsEvent.LOW, about)
    return bool(Account.objects.filter(pk=user_id).exclude(low_due=0).update(low_due=0))


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
