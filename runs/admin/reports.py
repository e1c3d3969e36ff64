"""Reports for staff: what was spent by user, agent, tool or model over some days. All of them count the same rows: the
charges (CAPTURE and USAGE) of these days of UTC. Refunds are not subtracted. Users and tools come from the totals by
day; models and agents from the rows. The cost is an estimate: the charge times the provider's share of it, as the
catalogue says now.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, NamedTuple

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.db.models import BigIntegerField, Count, F, OuterRef, QuerySet, Subquery, Sum, TextField, Value
from django.db.models.expressions import Combinable
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Coalesce
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from config.kernel import clock, money
from config.kernel.ids import first_id
from credits.models import CHARGES, DayTotal, EntryType, LedgerEntry
from credits.serializers import no_formula
from credits.usage import MODEL_KEY, display_names
from runs.models import AgentModel, Run, Tool

PALETTE = ["#3b82f6", "#22c55e", "#f59e0b", "#a855f7", "#14b8a6", "#ec4899", "#94a3b8"]
PERIODS = (1, 7, 30, 90)
DEFAULT_DAYS = 30
ROWS_SHOWN, ROWS_DRAWN, CSV_ROWS = 100, 10, 10_000
CLOCKS_DIFFER = timedelta(hours=1)


def chart(labels: list[str], series: list[tuple[str, str, list[Any]]], total: str) -> dict[str, Any]:
    """The data of a chart for Chart.js, and its total as text."""
    datasets = [{"label": label, "data": data, "backgroundColor": colour} for label, colour, data in series]
    return {"data": json.dumps({"labels": labels, "datasets": datasets}), "total": total, "empty": not series}


def chart_by_day(days: int, series: Sequence[tuple[str, Mapping[date, int]]]) -> dict[str, Any]:
    """A chart of the micro-credits of the last days, by label and by day of UTC."""
    shown = [first_day(days) + timedelta(days=number) for number in range(days)]
    drawn = [
        (label, colour, [spent.get(day, 0) / money.MICRO for day in shown])
        for colour, (label, spent) in zip(PALETTE, series, strict=False)
    ]
    total = money.rounded(sum(sum(spent.values()) for _, spent in series))
    return chart([f"{day:%d %b}" for day in shown], drawn, f"{total} credits")


class Row(NamedTuple):
    """``cost``: what the provider gets of ``amount``; None if it is not known."""

    name: str
    amount: int
    records: int
    link: str = ""
    cost: int | None = None

    @property
    def margin(self) -> int | None:
        return None if self.cost is None else self.amount - self.cost


def first_day(days: int) -> date:
    return clock.now().astimezone(UTC).date() - timedelta(days=days - 1)


def _by_key(rows: QuerySet[Any], key: Combinable, total: Any, count: Any) -> QuerySet[Any, Any]:
    """``key``, total and count, the largest total first."""
    found = rows.order_by().values(key=key).annotate(total=total, count=count)
    return found.order_by("-total", "key").values_list("key", "total", "count")


def _totals(days: int, key: Combinable) -> QuerySet[Any, Any]:
    """The charges by the totals by day."""
    return _by_key(DayTotal.objects.filter(day__gte=first_day(days)), key, Sum("amount"), Sum("records"))


def _charges(days: int, types: Sequence[EntryType], key: Combinable) -> QuerySet[Any, Any]:
    """The charges by the rows of the ledger, by a range of the primary key."""
    begin = datetime.combine(first_day(days), time.min, UTC)
    # An id's time is the process's clock, ``created_at`` the database's, by which the totals count.
    ids = first_id("led", begin - CLOCKS_DIFFER)
    rows = LedgerEntry.objects.filter(pk__gte=ids, created_at__gte=begin, type__in=types)
    return _by_key(rows, key, Cast(Sum("amount"), BigIntegerField()), Count("pk"))


def by_user(days: int, limit: int) -> list[Row]:
    # An expression: with the bare column, SQLite would read the totals of all days, in that column's order.
    found = list(_totals(days, F("account_id") + 0)[:limit])
    users = get_user_model()._default_manager.in_bulk([key for key, *_ in found])
    return [Row(users[key].get_username(), total, count, reverse("person", args=[key])) for key, total, count in found]


def by_tool(days: int, limit: int) -> list[Row]:
    """The use of all models is one row. Its cost is in the report by model."""
    found = list(_totals(days, F("tool_key"))[:limit])
    names = display_names([key for key, *_ in found if key])
    return _priced(found, Tool.objects, names | dict.fromkeys(("", None), names[MODEL_KEY]))


def by_model(days: int, limit: int) -> list[Row]:
    """The use of models: turns and summaries, also those that ended early; without the calls of tools."""
    model = Coalesce(KT("price__model"), Value(""), output_field=TextField())
    return _priced(list(_charges(days, [EntryType.USAGE], model)[:limit]), AgentModel.objects, {"": "Unknown"})


def _priced(found: list[tuple[Any, int, int]], rows: Any, names: dict[Any, str]) -> list[Row]:
    """With the cost, by what the provider now gets of the price of the model or tool."""
    known = rows.filter(name__in=[key for key, *_ in found], provider_cost_percent__isnull=False)
    shares = dict(known.values_list("name", "provider_cost_percent"))
    costs = {key: round(total * shares[key] / 100) for key, total, _ in found if key in shares}
    return [Row(names.get(key, key), total, count, cost=costs.get(key)) for key, total, count in found]


def by_agent(days: int, limit: int) -> list[Row]:
    """All charges of the runs of each agent: of models and of tools."""
    agent = Subquery(Run.objects.filter(pk=OuterRef("run_id")).order_by().values("agent_name")[:1])
    found = _charges(days, CHARGES, Coalesce(agent, Value("")))[:limit]
    return [Row(key or "No agent", total, count) for key, total, count in found]


class Report(NamedTuple):
    """``costs``: whether its rows have a cost and a margin."""

    label: str
    about: str
    permissions: tuple[str, ...]
    read: Callable[[int, int], list[Row]]
    costs: bool = False


LEDGER = "credits.view_ledgerentry"
ALL, MODELS = "All charges.", "The use of models only, with summaries and what ended early; no calls of tools."
OF_AGENTS = "All charges, of models and of tools, by the run's agent."
REPORTS = {
    "user": Report("User", ALL, (LEDGER, "auth.view_user"), by_user),
    "tool": Report("Tool", ALL, (LEDGER,), by_tool, costs=True),
    "model": Report("Model", MODELS, ("runs.view_turn",), by_model, costs=True),
    "agent": Report("Agent", OF_AGENTS, ("runs.view_turn",), by_agent),
}


def allowed(request: HttpRequest) -> dict[str, Report]:
    return {name: report for name, report in REPORTS.items() if request.user.has_perms(report.permissions)}


def show(request: HttpRequest) -> HttpResponse:
    """``?by=user&days=30``, with ``&as=csv`` for the file."""
    choices = allowed(request)
    if not choices:
        raise PermissionDenied
    name = request.GET.get("by", "")
    name = name if name in choices else next(iter(choices))
    days = next((days for days in PERIODS if str(days) == request.GET.get("days")), DEFAULT_DAYS)
    report = choices[name]
    if request.GET.get("as") == "csv":
        return as_csv(name, report, days)
    rows = report.read(days, ROWS_SHOWN)
    drawn = rows[:ROWS_DRAWN]
    series = [("credits", PALETTE[0], [row.amount / money.MICRO for row in drawn])] if rows else []
    context = {"title": "Reports", "by": name, "days": days, "report": report, "choices": choices, "periods": PERIODS}
    context |= {"rows": rows, "limit": ROWS_SHOWN if len(rows) == ROWS_SHOWN else 0}
    context["chart"] = chart([row.name for row in drawn], series, "")
    return TemplateResponse(request, "admin/runs/reports.html", admin.site.each_context(request) | context)


def as_csv(name: str, report: Report, days: int) -> HttpResponse:
    answer = HttpResponse(content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="{name}-{first_day(days)}-{days}d.csv"'
    lines = csv.writer(answer)
    more = ["provider cost", "margin"] if report.costs else []
    lines.writerow([report.label.lower(), "credits", "charges", *more])
    for row in report.read(days, CSV_ROWS):
        known = ["" if amount is None else money.to_text(amount) for amount in (row.cost, row.margin)]
        lines.writerow([no_formula(row.name), money.to_text(row.amount), row.records, *known[: len(more)]])
    return answer
