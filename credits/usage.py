"""The usage reports: reading only, and of one account at a time. Amounts are micro-credits.

A period is a rolling window that ends now: ``7d`` begins exactly 7 × 24 hours before now, and a row of that very
microsecond is inside. What is recorded while the report is made may be in it. ``all`` has no lower bound.

Whole UTC days come from the totals that the database keeps, the day that a period begins in the midst of from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from operator import attrgetter
from typing import Any

from django.conf import settings
from django.db.models import BigIntegerField, Count, F, Max, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Coalesce, TruncDate
from django.utils.module_loading import import_string

from config.kernel import clock
from credits.ledger import account_for, net_spending
from credits.models import SPENDING, ChatDayTotal, ChatTotal, DayTotal, EntryType, LedgerEntry, RunTotal

PERIODS = {"7d": 7, "30d": 30, "90d": 90, "all": None}
DEFAULT_PERIOD = "all"
MODEL_KEY = "model"
EXPORT_BATCH = 1000
DAY = timedelta(days=1)


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
    sums = _add(
        [
            _whole_days(DayTotal, user_id, period).values(key=F("tool_key")),
            *(rows.exclude(type=EntryType.REFUND).values(key=_tool()) for rows in _first_hours(user_id, period)),
        ]
    )
    groups = [
        UsageGroup(tool or MODEL_KEY, display_name(tool or MODEL_KEY), total.amount, total.records, total.latest)
        for tool, total in sums.items()
    ]
    groups.sort(key=lambda group: (-group.total_debited, group.tool_key))
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
    if period.start is None:
        sums = _add([ChatTotal.objects.filter(account_id=user_id).values(key=F("chat_id"))])
    else:
        sums = _add(
            [
                _whole_days(ChatDayTotal, user_id, period).values(key=F("chat_id")),
                *(
                    rows.filter(chat_id__isnull=False).values(key=F("chat_id"))
                    for rows in _first_hours(user_id, period)
                ),
            ]
        )
    titles = _titles(user_id, sums)
    entries = [ChatUsage(chat_id, titles.get(chat_id), total.amount, total.latest) for chat_id, total in sums.items()]
    # Newest first, and by id where that is the same.
    entries.sort(key=attrgetter("chat_id"))
    entries.sort(key=attrgetter("timestamp"), reverse=True)
    return entries


def of_chat(user_id: int, chat_id: str) -> tuple[str | None, list[RunUsage]]:
    """The chat's title and its spend by (tool, run), refunds netted, newest activity first.

    Another user's chat is as empty as one that does not exist: (None, []).
    """
    totals = RunTotal.objects.filter(account_id=user_id, chat_id=chat_id).order_by("-latest", "run_id", "tool_key")
    items = [
        RunUsage(run_id, tool or None, amount, latest)
        for run_id, tool, amount, latest in totals.values_list("run_id", "tool_key", "amount", "latest")
    ]
    return _titles(user_id, [chat_id]).get(chat_id), items


def by_day(user_id: int, period: Period) -> list[DayUsage]:
    """What was debited by UTC day, as in ``summary``, oldest first; days without usage are left out."""
    sums = _add(
        [
            _whole_days(DayTotal, user_id, period).values(key=F("day")),
            *(
                rows.exclude(type=EntryType.REFUND).values(key=TruncDate("created_at", tzinfo=UTC))
                for rows in _first_hours(user_id, period)
            ),
        ]
    )
    return [DayUsage(day, total.amount, total.records) for day, total in sorted(sums.items())]


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


@dataclass(frozen=True)
class _Total:
    amount: int
    records: int
    latest: datetime


def _first_hours(user_id: int, period: Period) -> list[QuerySet[LedgerEntry]]:
    """The rows of the day that the period begins in the midst of, if it does."""
    if period.start is None or period.start == _midnight(period.start):
        return []
    rows = LedgerEntry.objects.filter(account_id=user_id, type__in=SPENDING).order_by()
    return [rows.filter(created_at__gte=period.start, created_at__lt=_midnight(period.start) + DAY)]


def _whole_days(model: type[DayTotal] | type[ChatDayTotal], user_id: int, period: Period) -> QuerySet[Any]:
    """The totals of the days after that."""
    totals: QuerySet[Any] = model._default_manager.filter(account_id=user_id)
    if period.start is None:
        return totals
    midnight = _midnight(period.start)
    return totals.filter(day__gte=(midnight if period.start == midnight else midnight + DAY).date())


def _midnight(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _add(sources: Iterable[QuerySet[Any]]) -> dict[Any, _Total]:
    """Each source grouped by its ``key``, and together."""
    sums: dict[Any, _Total] = {}
    for source in sources:
        of_rows = source.model is LedgerEntry
        groups = source.annotate(
            total=Cast(Sum(net_spending() if of_rows else F("amount")), BigIntegerField()),
            count=Count("*") if of_rows else Sum("records"),
            newest=Max("created_at" if of_rows else "latest"),
        )
        for key, total, count, newest in groups.values_list("key", "total", "count", "newest"):
            known = sums.get(key)
            sums[key] = (
                _Total(known.amount + total, known.records + int(count), max(known.latest, newest))
                if known
                else _Total(total, int(count), newest)
            )
    return sums


def _tool() -> Coalesce:
    return Coalesce("tool_key", Value(""))


def _titles(user_id: int, chat_ids: Iterable[str]) -> dict[str, str | None]:
    titles_of: Callable[[int, Iterable[str]], dict[str, str | None]] = import_string(settings.CREDITS_CHAT_TITLES)
    return titles_of(user_id, chat_ids)
