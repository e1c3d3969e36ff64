"""The admin's first page: how the service is doing, in pictures.

Each figure is of a bounded span of time, read by a range of the primary key (ids are made in the order of time) or an
index of its own, and remembered for ADMIN_DASHBOARD_SECONDS in each process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.cache import cache
from django.db.models import BigIntegerField, Count, F, Q, Sum, Value
from django.db.models.functions import Cast, Coalesce, TruncDate, TruncHour
from django.http import HttpRequest
from django.urls import reverse

from config.kernel import clock, money
from config.kernel.ids import first_id
from credits.models import EntryType, LedgerEntry
from credits.usage import MODEL_KEY, display_name
from runs.admin.story import TONES, span
from runs.models import Run, RunStatus
from webhooks.models import Delivery, Endpoint

HOURS, DAYS, FAILURE_DAYS = 24, 14, 7
TOOLS_SHOWN = 6
LIVE_MAX = 10_000
COLOURS = {"grey": "#94a3b8", "blue": "#3b82f6", "amber": "#f59e0b", "green": "#22c55e", "red": "#ef4444"}
PALETTE = ["#3b82f6", "#22c55e", "#f59e0b", "#a855f7", "#14b8a6", "#ec4899", "#94a3b8"]
LEGEND = {
    "plugins": {"legend": {"display": True, "position": "bottom", "align": "start", "labels": {"boxWidth": 10}}},
    "responsive": True,
    "maintainAspectRatio": False,
    "animation": False,
}
STACKED = LEGEND | {
    "scales": {
        "x": {"stacked": True, "grid": {"display": False}, "ticks": {"maxTicksLimit": 8}},
        "y": {"stacked": True, "beginAtZero": True, "ticks": {"maxTicksLimit": 5}},
    }
}


def show(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Adds to the page what the signed-in person may look at."""
    may = request.user.has_perm
    panels: dict[str, Any] = {}
    if may("runs.view_run"):
        panels |= {"now": remembered("now", runs_now), "runs": remembered("runs", runs_by_hour)}
        panels["failures"] = remembered("failures", failure_codes)
    if may("credits.view_ledgerentry"):
        panels["credits"] = remembered("credits", credits_by_day)
    if may("webhooks.view_delivery"):
        panels["webhooks"] = remembered("webhooks", webhook_health)
    return context | {
        "panels": panels,
        "options": json.dumps(STACKED),
        "title": "Dashboard",
        "dashboard": "admin/runs/dashboard.html",
    }


def remembered(name: str, compute: Any) -> Any:
    found = cache.get(f"staff:{name}") if settings.ADMIN_DASHBOARD_SECONDS else None
    if found is None:
        found = compute()
        cache.set(f"staff:{name}", found, settings.ADMIN_DASHBOARD_SECONDS or None)
    return found


def runs_now() -> dict[str, Any]:
    """The live ones by state, each counted as far as LIVE_MAX, and the one that has been queued longest."""
    counts = {}
    for status in (RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.WAITING):
        found = Run.objects.filter(status=status).order_by()[: LIVE_MAX + 1].count()
        counts[str(status)] = f"{LIVE_MAX:,}+" if found > LIVE_MAX else f"{found:,}"
    oldest = Run.objects.filter(status=RunStatus.QUEUED).order_by("pk").values("pk", "created_at").first()
    return {
        "counts": [
            {"label": status.capitalize(), "value": count, "link": _runs(f"status__exact={status}")}
            for status, count in counts.items()
        ],
        "oldest": oldest
        and {
            "age": span(clock.now() - oldest["created_at"]),
            "link": reverse("admin:runs_run_change", args=[oldest["pk"]]),
        },
    }


def runs_by_hour() -> dict[str, Any]:
    """Those of the last HOURS by the hour in which they were started and their present state."""
    begin = _hour(clock.now()) - timedelta(hours=HOURS - 1)
    rows = (
        Run.objects.filter(pk__gte=first_id("run", begin), created_at__gte=begin)
        .order_by()
        # The hour first: grouped by state first, SQLite would go through all runs in that index's order.
        .values(hour=TruncHour("created_at", tzinfo=UTC), state=F("status"))
        .annotate(count=Count("pk"))
    )
    found = {(row["state"], row["hour"]): row["count"] for row in rows}
    hours = [begin + timedelta(hours=number) for number in range(HOURS)]
    counts = {status: [found.get((status, hour), 0) for hour in hours] for status in RunStatus.values}
    return chart(
        [f"{hour:%H}:00" for hour in hours],
        [(status, COLOURS[TONES[status]], counts[status]) for status in ORDER if any(counts[status])],
        f"{sum(found.values()):,} runs",
    )


ORDER = ["completed", "failed", "cancelled", "waiting", "running", "queued"]


def credits_by_day() -> dict[str, Any]:
    """Captures and model usage of the last DAYS by UTC day and tool, as the usage reports count them."""
    today = clock.now().astimezone(UTC).date()
    first = today - timedelta(days=DAYS - 1)
    totals: defaultdict[str, dict[date, int]] = defaultdict(dict)
    for day, tool, amount in _spent_since(first):
        totals[tool][day] = amount
    largest = sorted(totals, key=lambda tool: -sum(totals[tool].values()))
    days = [first + timedelta(days=number) for number in range(DAYS)]
    series = [(display_name(tool), [totals[tool].get(day, 0) for day in days]) for tool in largest[:TOOLS_SHOWN]]
    rest = [sum(totals[tool].get(day, 0) for tool in largest[TOOLS_SHOWN:]) for day in days]
    if any(rest):
        series.append(("Others", rest))
    total = sum(sum(by_day.values()) for by_day in totals.values())
    return chart(
        [f"{day:%d %b}" for day in days],
        [
            (label, PALETTE[number], [amount / money.MICRO for amount in amounts])
            for number, (label, amounts) in enumerate(series)
        ],
        f"{money.to_text(total)} credits",
    )


def _spent_since(first: date) -> list[tuple[date, str, int]]:
    begin = datetime(first.year, first.month, first.day, tzinfo=UTC)
    rows = (
        LedgerEntry.objects.filter(
            pk__gte=first_id("led", begin), created_at__gte=begin, type__in=[EntryType.CAPTURE, EntryType.USAGE]
        )
        .order_by()
        .values(day=TruncDate("created_at", tzinfo=UTC), tool=Coalesce("tool_key", Value(MODEL_KEY)))
        .annotate(total=Cast(Sum("amount"), BigIntegerField()))
    )
    return [(row["day"], row["tool"], row["total"]) for row in rows]


def failure_codes() -> list[dict[str, Any]]:
    """Of the last FAILURE_DAYS, the most frequent first; ``share`` is of the most frequent, in percent."""
    begin = clock.now() - timedelta(days=FAILURE_DAYS)
    rows = list(
        Run.objects.filter(error_code__isnull=False, pk__gte=first_id("run", begin))
        .order_by()
        .values("error_code")
        .annotate(count=Count("pk"))
        .order_by("-count", "error_code")
    )
    most = max((row["count"] for row in rows), default=1)
    return [
        {
            "code": row["error_code"],
            "count": f"{row['count']:,}",
            "share": round(row["count"] / most * 100, 1),
            "link": _runs(f"error_code={row['error_code']}"),
        }
        for row in rows
    ]


def webhook_health() -> dict[str, Any]:
    """Deliveries of the last HOURS by hour and state; what is overdue; endpoints that fail."""
    now = clock.now()
    begin = _hour(now) - timedelta(hours=HOURS - 1)
    rows = (
        Delivery.objects.filter(pk__gte=first_id("dlv", begin), created_at__gte=begin)
        .order_by()
        .values("status", hour=TruncHour("created_at", tzinfo=UTC))
        .annotate(count=Count("pk"), again=Count("pk", filter=Q(attempt_count__gt=1)))
    )
    found = {(row["status"], row["hour"]): row["count"] for row in rows}
    again = sum(row["again"] for row in rows)
    delivered = sum(count for (status, _), count in found.items() if status == Delivery.Status.DELIVERED)
    dead = sum(count for (status, _), count in found.items() if status == Delivery.Status.DEAD)
    pending = Delivery.objects.filter(status=Delivery.Status.PENDING).order_by()
    oldest = pending.order_by("next_attempt_at").values_list("next_attempt_at", flat=True).first()
    failing = Endpoint.objects.filter(failing=True, enabled=True, deleted_at=None).order_by()[: LIVE_MAX + 1].count()
    hours = [begin + timedelta(hours=number) for number in range(HOURS)]
    labels = [
        (Delivery.Status.DELIVERED, "green"),
        (Delivery.Status.PENDING, "amber"),
        (Delivery.Status.DEAD, "red"),
    ]
    series = [
        (str(status.label).lower(), COLOURS[tone], [found.get((status, hour), 0) for hour in hours])
        for status, tone in labels
    ]
    picture = chart([f"{hour:%H}:00" for hour in hours], [one for one in series if any(one[2])], "")
    finished = delivered + dead
    listed = reverse("admin:webhooks_delivery_changelist")
    return picture | {
        "total": f"{sum(found.values()):,} deliveries",
        "facts": [
            ("Delivered", f"{delivered / finished:.1%}" if finished else "–", f"{listed}?status__exact=DELIVERED"),
            ("Needed another attempt", f"{again:,}", listed),
            ("Dead", f"{dead:,}", f"{listed}?status__exact=DEAD"),
            ("Pending", f"{pending[: LIVE_MAX + 1].count():,}", f"{listed}?status__exact=PENDING"),
            ("Overdue by", span(now - oldest) if oldest and oldest < now else "–", f"{listed}?status__exact=PENDING"),
            (
                "Failing endpoints",
                f"{failing:,}",
                reverse("admin:webhooks_endpoint_changelist") + "?failing__exact=1",
            ),
        ],
    }


def chart(labels: list[str], series: list[tuple[str, str, list[Any]]], total: str) -> dict[str, Any]:
    """For Chart.js, and for those who can't see it."""
    datasets = [
        {"label": label, "data": data, "backgroundColor": colour, "borderRadius": 2, "maxBarThickness": 28}
        for label, colour, data in series
    ]
    return {"data": json.dumps({"labels": labels, "datasets": datasets}), "total": total, "empty": not series}


def _runs(query: str) -> str:
    return f"{reverse('admin:runs_run_changelist')}?{query}"


def _hour(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
