"""The usage reports: read-only, one account each, in micro-credits. A period is a rolling window that ends now: ``7d``
begins exactly 7 × 24 hours before now, and includes a row at exactly that time.
"""

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, NamedTuple

from django.conf import settings
from django.db.models import Count, F, Max, Q, QuerySet, Sum, Value
from django.db.models.functions import Coalesce, NullIf, TruncDate
from django.utils.module_loading import import_string
from django.utils.text import capfirst

from config.api.pagination import beyond
from config.kernel import clock
from credits import models
from credits.ledger import account_for
from credits.models import LedgerEntry
from credits.sums import NET_SPENDING

PERIODS = {"7d": 7, "30d": 30, "90d": 90, "all": None}
DEFAULT_PERIOD = "all"
MODEL_KEY = "model"
EXPORT_BATCH = 1000
DAY = timedelta(days=1)


class Period(NamedTuple):
    """``start`` is None for ``all``."""

    start: datetime | None
    end: datetime


def period_of(name: str) -> Period:
    """The window that ends now. ``name`` is a key of PERIODS."""
    days, end = PERIODS[name], clock.now()
    return Period(None if days is None else end - timedelta(days=days), end)


def display_names(tool_keys: Collection[str]) -> dict[str, str]:
    """The names that people see: the catalogue's; for tools that are not in it ``draw_chart`` → ``Draw chart``."""
    names: dict[str, str] = import_string(settings.CREDITS_TOOL_NAMES)(tool_keys)
    words = {key: " ".join(key.replace("_", " ").replace("-", " ").split()) for key in tool_keys}
    return {key: capfirst(text) or key for key, text in words.items()} | names | {MODEL_KEY: "Model usage"}


def summary(user_id: int, period: Period) -> dict[str, Any]:
    """Debits (captures and model usage, without refunds) by tool, largest first."""
    account = account_for(user_id)
    sums = _sums(models.DayTotal, user_id, period, "tool_key", Coalesce("tool_key", Value("")))
    names = display_names([tool for tool in sums if tool])
    groups = [
        {"tool_key": tool or MODEL_KEY, "display_name": names[tool or MODEL_KEY], **total._asdict()}
        for tool, total in sums.items()
    ]
    return {
        "groups": sorted(groups, key=lambda group: (-group["amount"], group["tool_key"])),
        "total_debited_all": sum(total.amount for total in sums.values()),
        "records_all": sum(total.records for total in sums.values()),
        "categories_count": len(groups),
        "period_start": period.start or account.created_at,
        "period_end": period.end,
    }


def by_chat(user_id: int, period: Period) -> list[dict[str, Any]]:
    """The spending of each chat less refunds, newest activity first. Deleted chats keep their title."""
    # ChatTotal is ChatDayTotal over all days, with fewer rows to read.
    totals = models.ChatDayTotal if period.start else models.ChatTotal
    sums = _sums(totals, user_id, period, "chat_id", F("chat_id"))
    sums.pop(None, None)  # rows without a chat
    titles = import_string(settings.CREDITS_CHAT_TITLES)(user_id, sums)
    newest_first = sorted(sorted(sums.items()), key=lambda item: item[1].latest, reverse=True)
    return [{"chat_id": key, "chat_title": titles.get(key), **total._asdict()} for key, total in newest_first]


def of_chat(user_id: int, chat_id: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The chat's title, and its spending less refunds by (tool, run), newest first. (None, []) without a chat."""
    totals = models.RunTotal.objects.filter(account_id=user_id, chat_id=chat_id)
    totals = totals.order_by("-latest", "run_id", "tool_key")
    items: list[Any] = list(totals.values("run_id", "amount", "latest", tool_name=NullIf("tool_key", Value(""))))
    return import_string(settings.CREDITS_CHAT_TITLES)(user_id, [chat_id]).get(chat_id), items


def by_day(user_id: int, period: Period) -> list[dict[str, Any]]:
    """Debits as in ``summary`` by UTC day, oldest first, without empty days."""
    sums = _sums(models.DayTotal, user_id, period, "day", TruncDate("created_at", tzinfo=UTC))
    return [{"date": day, **total._asdict()} for day, total in sorted(sums.items())]


def export(user_id: int) -> Iterator[LedgerEntry]:
    """Every row, newest first. Read in batches: a slow client holds little memory and no database cursor."""
    rows = LedgerEntry.objects.filter(account_id=user_id).order_by("-created_at", "-pk")
    older = Q()
    while batch := list(rows.filter(older)[:EXPORT_BATCH]):
        yield from batch
        older = beyond(batch[-1].created_at, batch[-1].pk, ascending=False)


class _Total(NamedTuple):
    amount: int
    records: int
    latest: datetime


def midnight(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _sums(model: type[models.UsageTotal], user_id: int, period: Period, key: str, key_of_row: Any) -> dict[Any, _Total]:
    """The sums by ``key``: of the totals of the period's whole days, and of the rows of the day in which it begins."""
    totals: QuerySet[Any] = model._default_manager.filter(account_id=user_id)
    rows: QuerySet[Any] = LedgerEntry.objects.none()
    if period.start is not None:
        whole = midnight(period.start)
        if whole < period.start:
            whole += DAY
            rows = LedgerEntry.objects.filter(account_id=user_id, type__in=model.types, created_at__lt=whole).order_by()
            rows = rows.filter(created_at__gte=period.start)
        totals = totals.filter(day__gte=whole.date())
    totals = totals.values_list(key).annotate(total=Sum("amount"), count=Sum("records"), newest=Max("latest"))
    rows = rows.values_list(key_of_row).annotate(total=Sum(NET_SPENDING), count=Count("*"), newest=Max("created_at"))
    sums: dict[Any, _Total] = {}
    for found, total, count, newest in chain(totals, rows):
        known = sums.get(found, _Total(0, 0, newest))
        sums[found] = _Total(known.amount + total, known.records + count, max(known.latest, newest))
    return sums
