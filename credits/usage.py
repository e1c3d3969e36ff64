"""The usage reports: reading only, and of one account at a time. Amounts are micro-credits.

A period is a rolling window that ends now: ``7d`` begins exactly 7 × 24 hours before now, and a row of that very
microsecond is inside. What is recorded while the report is made may be in it. ``all`` has no lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import BigIntegerField, Count, F, Max, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Coalesce, TruncDate
from django.utils.module_loading import import_string

from config.api import clock
from credits.ledger import account_for, net_spending
from credits.models import SPENDING, EntryType, LedgerEntry

PERIODS = {"7d": 7, "30d": 30, "90d": 90, "all": None}
DEFAULT_PERIOD = "all"
MODEL_KEY = "model"
EXPORT_BATCH = 1000


@dataclass(frozen=True)
class Period:
    """``start`` is None for ``all``."""

    start: datetime | None
    end: datetime


@dataclass(frozen=True)
class UsageGroup:
    tool_key: str
    display_name: str
    total_debited: int
    records: int
    latest_usage_at: datetime


@dataclass(frozen=True)
class UsageSummary:
    groups: list[UsageGroup]
    total_debited_all: int
    records_all: int
    categories_count: int
    period_start: datetime
    period_end: datetime


@dataclass(frozen=True)
class ChatUsage:
    chat_id: str
    chat_title: str | None
    amount: int
    timestamp: datetime


@dataclass(frozen=True)
class RunUsage:
    run_id: str
    tool_name: str | None
    amount: int
    timestamp: datetime


@dataclass(frozen=True)
class DayUsage:
    date: date
    total_debited: int
    records: int


def period_of(name: str) -> Period:
    """The window that ends now. ``name`` is a key of PERIODS."""
    days, end = PERIODS[name], clock.now()
    return Period(None if days is None else end - timedelta(days=days), end)


def display_name(tool_key: str) -> str:
    """``draw_chart`` → ``Draw chart``; bare model usage → ``Model usage``."""
    if tool_key == MODEL_KEY:
        return "Model usage"
    words = " ".join(tool_key.replace("_", " ").replace("-", " ").split())
    return words[:1].upper() + words[1:] or tool_key


def summary(user_id: int, period: Period) -> UsageSummary:
    """What was debited (captures and model usage; refunds don't count here) by tool, largest first."""
    account = account_for(user_id)
    rows = (
        _debits(user_id, period)
        .values(key=Coalesce("tool_key", Value(MODEL_KEY)))
        .annotate(total=_total(F("amount")), records=Count("*"), latest=Max("created_at"))
        .order_by("-total", "key")
    )
    groups = [
        UsageGroup(row["key"], display_name(row["key"]), row["total"], row["records"], row["latest"]) for row in rows
    ]
    return UsageSummary(
        groups=groups,
        total_debited_all=sum(group.total_debited for group in groups),
        records_all=sum(group.records for group in groups),
        categories_count=len(groups),
        period_start=period.start or account.created_at,
        period_end=period.end,
    )


def by_chat(user_id: int, period: Period) -> list[ChatUsage]:
    """Each chat's spend, refunds netted, newest activity first. Deleted chats keep their title."""
    rows: list[Any] = list(
        _spending(user_id, period)
        .filter(chat_id__isnull=False)
        .values("chat_id")
        .annotate(total=_total(net_spending()), latest=Max("created_at"))
        .order_by("-latest", "chat_id")
    )
    titles = _titles(user_id, [row["chat_id"] for row in rows])
    return [ChatUsage(row["chat_id"], titles.get(row["chat_id"]), row["total"], row["latest"]) for row in rows]


def of_chat(user_id: int, chat_id: str) -> tuple[str | None, list[RunUsage]]:
    """The chat's title and its spend by (tool, run), refunds netted, newest activity first.

    Another user's chat is as empty as one that does not exist: (None, []).
    """
    rows: Iterable[Any] = (
        _spending(user_id)
        .filter(chat_id=chat_id, run_id__isnull=False)
        .values("run_id", "tool_key")
        .annotate(total=_total(net_spending()), latest=Max("created_at"))
        .order_by("-latest", "run_id", "tool_key")
    )
    items = [RunUsage(row["run_id"], row["tool_key"], row["total"], row["latest"]) for row in rows]
    return _titles(user_id, [chat_id]).get(chat_id), items


def by_day(user_id: int, period: Period) -> list[DayUsage]:
    """What was debited by UTC day, as in ``summary``, oldest first; days without usage are left out."""
    rows = (
        _debits(user_id, period)
        .values(day=TruncDate("created_at", tzinfo=UTC))
        .annotate(total=_total(F("amount")), records=Count("*"))
        .order_by("day")
    )
    return [DayUsage(row["day"], row["total"], row["records"]) for row in rows]


def entries_of(user_id: int) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(account_id=user_id)


def export(user_id: int) -> Iterator[LedgerEntry]:
    """Every row, newest first, read in batches: a slow client holds neither memory nor a database cursor."""
    rows = entries_of(user_id).order_by("-created_at", "-pk")
    batch = list(rows[:EXPORT_BATCH])
    while batch:
        yield from batch
        last = batch[-1]
        older = Q(created_at__lt=last.created_at) | Q(pk__lt=last.pk)
        batch = list(rows.filter(older, created_at__lte=last.created_at)[:EXPORT_BATCH])


def _spending(user_id: int, period: Period | None = None) -> QuerySet[LedgerEntry]:
    rows = LedgerEntry.objects.filter(account_id=user_id, type__in=SPENDING).order_by()
    return rows.filter(created_at__gte=period.start) if period and period.start else rows


def _debits(user_id: int, period: Period) -> QuerySet[LedgerEntry]:
    # Written as "spending, but no refunds" so that SQLite, too, sees that the partial index has all it needs.
    return _spending(user_id, period).exclude(type=EntryType.REFUND)


def _total(amount: Any) -> Any:
    # The sum of a bigint is a numeric on PostgreSQL, hence the cast.
    return Cast(Sum(amount), BigIntegerField())


def _titles(user_id: int, chat_ids: Iterable[str]) -> dict[str, str | None]:
    titles_of: Callable[[int, Iterable[str]], dict[str, str | None]] = import_string(settings.CREDITS_CHAT_TITLES)
    return titles_of(user_id, chat_ids)
