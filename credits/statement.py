"""The ledger in words, for pages of staff: a sentence, a signed amount and the balance after each row."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from django.conf import settings
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.db.models.lookups import IsNull
from django.utils.module_loading import import_string

from config.kernel import money
from credits.models import SETTLEMENTS, EntryType, LedgerEntry

# The most rows that a page reads to compute balances. A page with a few old rows of a busy account shows none.
LATER_MAX = 10_000


def folded() -> Q:
    """The rows that a statement shows: without settled holds, and without releases that belong to a charge."""
    answers = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS)
    # Not type__in=CHARGES: SQLite uses the partial index only if the query repeats its condition.
    settlements = LedgerEntry.objects.filter(against=OuterRef("against"), type__in=SETTLEMENTS)
    charges = settlements.exclude(type=EntryType.RELEASE)
    whole = Q(type=EntryType.RELEASE) & _none(charges)
    return ~Q(type__in=[EntryType.HOLD, EntryType.RELEASE]) | (Q(type=EntryType.HOLD) & _none(answers)) | whole


def _none(rows: QuerySet[LedgerEntry]) -> IsNull:
    # Not Exists: PostgreSQL would read all settlements of the ledger into a hash table, for a page of 50 rows.
    return IsNull(Subquery(rows.order_by().values("type")[:1]), True)


def effect(entry: LedgerEntry) -> int:
    """What the row added to the balance; negative if it took from it."""
    return EntryType[entry.type].balance * entry.amount


def in_credits(micro: int, shown: Callable[[int], str] = money.to_text) -> str:
    return f"{shown(micro)} credit{'' if micro == money.MICRO else 's'}"


def signed(micro: int) -> str:
    return f"+{money.rounded(micro)}" if micro > 0 else money.rounded(micro).replace("-", "−")


def subject(entry: LedgerEntry) -> str:
    """The tool, or the model with its turn or summary, and a note if it ended early and was charged in part."""
    if entry.tool_key or not entry.run_id:
        return entry.tool_key or ""
    held = (entry.against.price if entry.against else entry.price) or {}
    turn = str(held.get("turn", ""))
    step = f", turn {turn}" if turn.isdecimal() else ", summary" if turn else ""
    return f"{held.get('model', 'model')}{step}" + (", ended early" if (entry.price or {}).get("partial") else "")


def sentence(entry: LedgerEntry, approved_at: datetime | None = None) -> str:
    """One sentence about the row. ``entry`` must have its account's user, its staff and its ``against`` loaded."""
    amount, what = in_credits(abs(entry.amount), money.rounded), subject(entry)
    by = f" by {entry.staff.get_username()}" if entry.staff else ""
    until = f", until {entry.expires_at:%Y-%m-%d}" if entry.expires_at else ""
    reason = f": {entry.reason}" if entry.reason else ""
    approval = ""
    if approved_at:
        approval = f", approved by {entry.account.user.get_username()} {approved_at.astimezone(UTC):%H:%M:%S}"
    sentences = {
        EntryType.GRANT: f"{amount} granted{by}{until}{reason}",
        EntryType.HOLD: f"{amount} held for {what}",
        EntryType.RELEASE: f"{amount} held for {what} are available again",
        EntryType.REFUND: f"{amount} refunded{by} for {what}{reason}",
        EntryType.ADJUSTMENT: f"{amount} {'added' if entry.amount > 0 else 'removed'}{by}{reason}",
        EntryType.EXPIRY: f"{amount} of a grant expired",
    }
    return sentences.get(EntryType[entry.type], f"{amount} for {what}{approval}")


def approvals(entries: Iterable[LedgerEntry]) -> dict[str, datetime]:
    """When the user approved the calls of these rows, by the call's id."""
    calls = {entry.invocation_id for entry in entries if entry.invocation_id}
    find: Callable[[set[str]], dict[str, datetime]] = import_string(settings.CREDITS_APPROVALS)
    return find(calls) if calls else {}


def balances_after(entries: Sequence[LedgerEntry]) -> dict[str, int]:
    """The account's balance after each row, by the row's id; empty if LATER_MAX rows are not enough."""
    if not entries:
        return {}
    # One statement, so that rows and balance belong to the same moment. Without an order, to stop at the limit.
    rows = LedgerEntry.objects.filter(
        account_id__in={entry.account_id for entry in entries},
        created_at__gte=min(entry.created_at for entry in entries),
    ).order_by()
    columns = ("account_id", "created_at", "pk", "type", "amount", "account__balance")
    found = list(rows.values_list(*columns)[: LATER_MAX + 1])
    if len(found) > LATER_MAX:
        return {}
    after: dict[str, int] = {}
    now: dict[int, int] = {}
    for account, _, key, kind, amount, balance in sorted(found, key=lambda row: row[1:3], reverse=True):
        after[key] = now.setdefault(account, balance)
        now[account] -= EntryType[kind].balance * amount
    return after
