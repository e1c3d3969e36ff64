"""A user's page for staff: credits, runs, failures, keys and webhooks, with links to their lists and to actions.

A fixed number of queries, each of a few rows that an index has in this order. It shows no text of the user.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, timedelta
from typing import Any

from django.db.models import Sum
from django.http import HttpRequest
from django.urls import reverse

from apikeys.models import ApiKey
from config.kernel import clock, money
from config.staff.base import list_links, page_of
from credits import statement
from credits.models import Account, DayTotal
from runs.admin.reports import CHART_OPTIONS, PALETTE, chart
from runs.admin.timeline import reasons
from runs.models import Run, RunStatus
from webhooks.models import Delivery, Endpoint

DAYS, ROWS_MAX = 30, 10
# The latest runs whose models are counted.
RUNS_COUNTED = 200
LINKS = [("All runs", "runs_run"), ("Chats", "chats_chat"), ("API keys", "apikeys_apikey")]
LINKS += [("Endpoints", "webhooks_endpoint"), ("Deliveries", "webhooks_delivery")]


def show(request: HttpRequest, user: Any) -> dict[str, Any]:
    """The context of the page: the panels that the signed-in person may see."""
    may = request.user.has_perm
    panels: dict[str, Any] = {}
    if may("credits.view_account"):
        account = Account.objects.filter(pk=user.pk).first() or Account(user=user)
        amounts = {"Balance": account.balance, "Held": account.held, "Available": account.available}
        panels["account"] = [(label, money.to_text(amount)) for label, amount in amounts.items()]
        panels["spend"] = _spend_by_day(user)
    if may("runs.view_run"):
        panels |= _runs(user)
    if may("apikeys.view_apikey"):
        keys = ApiKey.objects.filter(user=user).order_by("-created_at", "-pk")
        panels["keys"] = list(keys.defer("digest")[:ROWS_MAX])
    if may("webhooks.view_endpoint"):
        endpoints = Endpoint.objects.filter(user=user, deleted_at=None).defer("secret", "secondary_secret", "url")
        panels["endpoints"] = list(endpoints.order_by("-pk")[:ROWS_MAX])
    if may("webhooks.view_delivery"):
        deliveries = Delivery.objects.filter(user=user, status=Delivery.Status.DEAD).defer("body")
        panels["dead"] = list(deliveries.order_by("-created_at", "-pk")[:ROWS_MAX])
    actions = [("Change the user", reverse("admin:auth_user_change", args=[user.pk]), "auth.change_user")]
    if Account.objects.filter(pk=user.pk).exists():
        actions[:0] = [
            (label, reverse("admin:credits_account_do_one", args=[user.pk, name]), f"credits.{name}_credits")
            for label, name in (("Grant credits", "grant"), ("Adjust account", "adjust"))
        ]
    lists = [("Ledger", "credits_ledgerentry", f"account__user__id__exact={user.pk}")]
    lists += [(label, model, f"user__id__exact={user.pk}") for label, model in LINKS]
    return {
        "person": user,
        "panels": panels,
        "links": list_links(request, lists),
        "actions": [(label, url) for label, url, permission in actions if may(permission)],
        "options": CHART_OPTIONS,
    }


def _spend_by_day(user: Any) -> dict[str, Any]:
    today = clock.now().astimezone(UTC).date()
    days = [today - timedelta(days=number) for number in reversed(range(DAYS))]
    rows = DayTotal.objects.filter(account_id=user.pk, day__gte=days[0]).order_by().values_list("day")
    spent = dict(rows.annotate(total=Sum("amount")))
    amounts = [float(spent.get(day, 0)) / money.MICRO for day in days]
    total = statement.in_credits(int(sum(spent.values())))
    return chart([f"{day:%d %b}" for day in days], [("credits", PALETTE[0], amounts)] if spent else [], total)


def _runs(user: Any) -> dict[str, Any]:
    latest = list(
        Run.objects.filter(user=user)
        .order_by("-created_at", "-pk")
        .only("status", "created_at", "resolved_model", "agent_name", "error_code")[:RUNS_COUNTED]
    )
    failed = Run.objects.filter(user=user, status=RunStatus.FAILED).order_by("-created_at", "-pk")[:ROWS_MAX]
    models = Counter(run.resolved_model for run in latest if run.resolved_model)
    agents = Counter(run.agent_name for run in latest if run.agent_name)
    return {
        "runs": [(run, page_of(Run, run.pk), RunStatus.tones()[run.status]) for run in latest[:ROWS_MAX]],
        "failures": [
            (run, page_of(Run, run.pk), reasons(run)[-1:]) for run in failed.defer("error_message", "metadata")
        ],
        "models": models.most_common(ROWS_MAX),
        "agents": agents.most_common(ROWS_MAX),
        "counted": len(latest),
    }
