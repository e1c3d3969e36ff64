"""The first page of the admin: is the service at work, if not, what to do about it, and charts of its state.

Each number covers a bounded period. Its query reads a range of the primary key (ids are in the order of creation) or
an index, ends after ADMIN_PANEL_SECONDS on PostgreSQL, and its result is cached for ADMIN_DASHBOARD_SECONDS.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

from django.core.cache import cache
from django.db import OperationalError, transaction
from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import TruncHour
from django.http import HttpRequest
from django.urls import reverse

from config.api import metrics_page
from config.database.batches import limit_statements
from config.database.retry import is_unavailable
from config.kernel import clock
from config.kernel.ids import first_id
from config.staff.base import page_of, span
from credits.models import DayTotal
from credits.usage import MODEL_KEY, display_names
from runs.admin import reports
from runs.admin.reports import chart
from runs.models import FINAL_RUN_STATUSES, LIVE_RUN_STATUSES, Run, RunStatus
from webhooks.metrics import oldest_due
from webhooks.models import Delivery, Endpoint

# How long a process reuses the dashboard's numbers before it reads them again.
ADMIN_DASHBOARD_SECONDS = 30
# PostgreSQL ends a query of the dashboard after this time; its panel then says so, and the others are shown.
ADMIN_PANEL_SECONDS = 5

HOURS, DAYS, FAILURE_DAYS = 24, 14, 7
TOOLS_SHOWN = 6
TOP_DAYS, TOP_ROWS = 7, 5
LIVE_MAX = 10_000
RUNBOOK = "/docs/operations#"
# As in the alerts of docs/prometheus.
QUEUED_SECONDS_MAX = 60
# Beat starts a job every few seconds; after this time without one, something is wrong.
BEAT_SECONDS_MAX = 300
# The latest runs of a day whose times are read.
RUNS_TIMED = 1000
# What is remembered of a panel whose query took too long.
SLOW = {"slow": True}
COLOURS = {"default": "#94a3b8", "info": "#3b82f6", "warning": "#f59e0b", "success": "#22c55e", "danger": "#ef4444"}
BAR_ORDER = [*FINAL_RUN_STATUSES, *reversed(LIVE_RUN_STATUSES)]


def show(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """The page's context with the panels that the signed-in person may see."""
    panels: dict[str, Any] = {
        name: remembered(name, read)
        for name, permission, read in (
            ("now", "runs.view_run", runs_now),
            ("runs", "runs.view_run", runs_by_hour),
            ("failures", "runs.view_run", failure_codes),
            ("health", "runs.view_run", health),
            ("times", "runs.view_run", times),
            ("credits", "credits.view_ledgerentry", credits_by_day),
            ("webhooks", "webhooks.view_delivery", webhook_health),
        )
        if request.user.has_perm(permission)
    }
    if reported := reports.allowed(request):
        address = f"{reverse('reports')}?days={TOP_DAYS}&by="
        panels["top"] = [
            (report, address + name, remembered(f"top:{name}", partial(report.read, TOP_DAYS, TOP_ROWS)))
            for name, report in reported.items()
        ]
    page = {"title": "Dashboard", "dashboard": "admin/runs/dashboard.html"}
    return context | page | {"panels": panels}


def remembered(name: str, compute: Callable[[], Any]) -> Any:
    return cache.get_or_set(f"staff:{name}", partial(in_time, compute), ADMIN_DASHBOARD_SECONDS)


def in_time(compute: Callable[[], Any]) -> Any:
    """What ``compute`` returns, or SLOW if the database needs too long for it: other panels are shown nevertheless."""
    try:
        with transaction.atomic():
            limit_statements(ADMIN_PANEL_SECONDS)
            return compute()
    except OperationalError as error:
        if is_unavailable(error):
            raise
        return SLOW


def runs_now() -> list[dict[str, Any]]:
    """Live runs by status, and those of them that await tool calls, each counted up to LIVE_MAX."""
    kinds = [(one.label, Q(status=one), f"status__exact={one.value}") for one in LIVE_RUN_STATUSES]
    return [
        {"label": label, "value": _counted(Run.objects.filter(which)), "link": _runs(query)}
        for label, which, query in [*kinds, ("Parked", Q(parked=True), "parked__exact=1")]
    ]


def _counted(rows: QuerySet[Any]) -> str:
    found = rows.order_by()[: LIVE_MAX + 1].count()
    return f"{LIVE_MAX:,}+" if found > LIVE_MAX else f"{found:,}"


def runs_by_hour() -> dict[str, Any]:
    """Runs of the last HOURS by the hour of their start and by their current status."""
    hours = _hours()
    found = {(row["state"], row["hour"]): row["count"] for row in _by_hour(Run, "run", hours[0])}
    total = sum(found.values())
    return status_chart(BAR_ORDER, found, hours, f"{total:,} run{'s' * (total != 1)}")


def credits_by_day() -> dict[str, Any]:
    """The charges of the last DAYS by UTC day and tool, as in the usage reports."""
    rows = DayTotal.objects.filter(day__gte=reports.first_day(DAYS)).order_by().values_list("tool_key", "day")
    totals: defaultdict[str, Counter[date]] = defaultdict(Counter)
    for tool, day, total in rows.annotate(total=Sum("amount")):
        totals[tool or MODEL_KEY][day] = total
    largest = sorted(totals, key=lambda tool: -totals[tool].total())
    names = display_names(largest[:TOOLS_SHOWN])
    series = [(names[tool], totals[tool]) for tool in largest[:TOOLS_SHOWN]]
    if rest := largest[TOOLS_SHOWN:]:
        series.append(("Others", sum((totals[tool] for tool in rest), Counter())))
    return reports.chart_by_day(DAYS, series)


def failure_codes() -> list[dict[str, Any]]:
    """Error codes of the last FAILURE_DAYS, the most frequent first; ``share`` is in percent of the first."""
    begin = clock.now() - timedelta(days=FAILURE_DAYS)
    runs = Run.objects.filter(error_code__isnull=False, pk__gte=first_id("run", begin)).order_by()
    rows = list(runs.values_list("error_code").annotate(count=Count("pk")).order_by("-count", "error_code"))
    most = max((count for _, count in rows), default=1)
    return [
        {
            "code": code,
            "count": f"{count:,}",
            "share": round(count / most * 100, 1),
            "link": _runs(f"error_code={code}"),
        }
        for code, count in rows
    ]


def webhook_health() -> dict[str, Any]:
    """Deliveries of the last HOURS by hour and status, the oldest overdue delivery, and failing endpoints."""
    now, hours = clock.now(), _hours()
    rows = _by_hour(Delivery, "dlv", hours[0]).annotate(again=Count("pk", filter=Q(attempt_count__gt=1)))
    found = {(row["state"], row["hour"]): row["count"] for row in rows}
    again = sum(row["again"] for row in rows)
    delivered = sum(count for (status, _), count in found.items() if status == Delivery.Status.DELIVERED)
    dead = sum(count for (status, _), count in found.items() if status == Delivery.Status.DEAD)
    # A delivery counts from its creation, not its last attempt: all are due, also those that are still retried.
    due = sum(found.values())
    pending = Delivery.objects.filter(status=Delivery.Status.PENDING)
    oldest = oldest_due(now)
    failing = Endpoint.objects.filter(failing=True, enabled=True, deleted_at=None)
    page, endpoints = reverse("admin:webhooks_delivery_changelist"), reverse("admin:webhooks_endpoint_changelist")
    return status_chart(Delivery.Status, found, hours, f"{due:,} deliveries") | {
        "facts": [
            ("Delivered", f"{delivered / due:.1%}" if due else "–", f"{page}?status__exact=DELIVERED"),
            ("Tried more than once", f"{again:,}", page),
            ("Dead", f"{dead:,}", f"{page}?status__exact=DEAD"),
            ("Pending", _counted(pending), f"{page}?status__exact=PENDING"),
            ("Longest overdue", span(now - oldest) if oldest else "none", f"{page}?status__exact=PENDING"),
            ("Failing endpoints", _counted(failing), f"{endpoints}?failing__exact=1"),
        ]
    }


def _by_hour(model: type[Run | Delivery], prefix: str, since: datetime) -> QuerySet[Any, Any]:
    """The number of rows by the hour of their creation and by their current status."""
    rows = model.objects.filter(pk__gte=first_id(prefix, since), created_at__gte=since).order_by()
    # The hour first: grouped by status first, SQLite would read all runs in the order of that index.
    return rows.values(hour=TruncHour("created_at", tzinfo=UTC), state=F("status")).annotate(count=Count("pk"))


def status_chart(statuses: Iterable[Any], found: dict[Any, int], hours: list[datetime], total: str) -> dict[str, Any]:
    """``found``: the number of rows by (status, hour). A status without rows is left out."""
    series = [
        (str(status.label).lower(), COLOURS[status.tone], [found.get((status.value, hour), 0) for hour in hours])
        for status in statuses
    ]
    return chart([f"{hour:%H}:00" for hour in hours], [one for one in series if any(one[2])], total)


def _runs(query: str) -> str:
    return f"{reverse('admin:runs_run_changelist')}?{query}"


def _hours() -> list[datetime]:
    """The beginnings of the last HOURS, of the oldest first."""
    latest = clock.now().astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return [latest - timedelta(hours=number) for number in reversed(range(HOURS))]


def health() -> list[dict[str, str]]:
    """Each part: its state, a tone, and the runbook if it is not well. ``link`` leads to the run that it is about."""
    found, now = metrics_page.reading(), clock.now()
    values = {sample.name: sample.value for gauge in found.gauges for sample in gauge.samples}
    workers, waited = int(values.get("agents_run_workers", 0)), values.get("agents_runs_oldest_queued_seconds", 0.0)
    redis = found.up["redis"]
    # Beat starts all jobs, so the job that succeeded last says how it is.
    ended = found.ends.values()
    silent = now - datetime.fromtimestamp(max(ended), UTC) if ended else None
    beat = silent is not None and silent.total_seconds() < BEAT_SECONDS_MAX
    beats = "works" if beat else f"silent for {span(silent)}" if silent else "no job has ended yet"
    if not redis:
        beats = "not known without Redis"
    # The run that could execute and has waited longest. The index ``run_due`` has only the first two conditions.
    runnable = Run.objects.filter(status=RunStatus.QUEUED, blocked=False, throttled=False).order_by("due_at")
    oldest = runnable.values_list("pk", flat=True).first() if waited else None
    waits = f"waits {span(timedelta(seconds=waited))}" if waited else "none waits"
    failed = Run.objects.filter(status=RunStatus.FAILED).order_by("-pk")
    last = failed.only("error_code", "failure_reason", "finished_at").first()
    error = f"{last.failure_reason or last.error_code}, {span(now - (last.finished_at or now))} ago" if last else "none"
    return [
        part("Workers", str(workers), workers > 0, "norunworkers"),
        part("Beat", beats, beat if redis else None, "housekeepingstale" if redis else "sourcedown"),
        part("Redis", "answers" if redis else "does not answer", redis, "sourcedown"),
        part("Oldest queued run", waits, waited <= QUEUED_SECONDS_MAX, "runsnottaken", oldest),
        part("Last error", error, None if last else True, "runsfail", last.pk if last else None),
    ]


def part(label: str, value: str, well: bool | None, runbook: str, run: str | None = None) -> dict[str, str]:
    tone = {True: "success", False: "danger", None: "default"}[well]
    link = page_of(Run, run) if run else ""
    return {"label": label, "value": value, "tone": tone, "runbook": "" if well else RUNBOOK + runbook, "link": link}


def times() -> dict[str, Any]:
    """The start delay, and with the running time the latency, of the latest runs of the last HOURS: half and 95 % are
    faster. A run's waits for its user, and in line behind an earlier run of its chat, do not count.
    """
    begin = clock.now() - timedelta(hours=HOURS)
    rows = Run.objects.filter(pk__gte=first_id("run", begin)).order_by("-pk")
    # A chat has one active run, so the last one that started before a run is the last one that it waited for.
    earlier = Run.objects.filter(
        chat=OuterRef("chat"), created_at__lt=OuterRef("created_at"), started_at__isnull=False
    ).order_by("-created_at")
    free_at = Subquery(earlier.values("finished_at")[:1])
    found = rows.values_list("created_at", free_at, "started_at", "finished_at", "ran_ms")[:RUNS_TIMED]
    begun = [
        (started - max(created, free or created), timedelta(milliseconds=ran), ended)
        for created, free, started, ended, ran in found
        if started
    ]
    delays = sorted(delay for delay, _, _ in begun)
    whole = sorted(delay + ran for delay, ran, ended in begun if ended)
    facts = [
        (f"{label} p{share}", span(percentile(durations, share)) if durations else "–")
        for label, durations in (("Start delay", delays), ("Latency", whole))
        for share in (50, 95)
    ]
    return {"facts": facts, "count": len(whole)}


def percentile(ordered: list[timedelta], share: int) -> timedelta:
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]
