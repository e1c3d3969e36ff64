"""The sidebar, and the search that finds anything by its id."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from unfold.dataclasses import SearchResult

from config.kernel.ids import ID_LENGTH, IdField

# (group, [(label, icon, app_label, model_name)])
GROUPS = [
    (
        "Runs",
        [
            ("Runs", "play_circle", "runs", "run"),
            ("Tool calls", "build", "runs", "toolinvocation"),
            ("Waitpoints", "pause_circle", "runs", "waitpoint"),
            ("Turns", "sync", "runs", "turn"),
            ("Stream events", "stream", "runs", "runevent"),
            ("Chats", "forum", "chats", "chat"),
            ("Attachments", "attach_file", "chats", "attachment"),
        ],
    ),
    (
        "Credits",
        [
            ("Accounts", "account_balance_wallet", "credits", "account"),
            ("Ledger", "receipt_long", "credits", "ledgerentry"),
        ],
    ),
    (
        "Webhooks",
        [
            ("Endpoints", "webhook", "webhooks", "endpoint"),
            ("Deliveries", "outbox", "webhooks", "delivery"),
            ("Attempts", "send", "webhooks", "attempt"),
        ],
    ),
    ("Catalogue", [("Models", "neurology", "runs", "agentmodel"), ("Tools", "construction", "runs", "tool")]),
    (
        "People",
        [
            ("Users", "person", "auth", "user"),
            ("Roles", "group", "auth", "group"),
            ("API keys", "key", "apikeys", "apikey"),
            ("Staff's actions", "history", "admin", "logentry"),
        ],
    ),
]


def sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """What the signed-in person may look at."""
    groups: list[dict[str, Any]] = [
        {"items": [{"title": "Dashboard", "icon": "dashboard", "link": reverse("admin:index")}]}
    ]
    for title, entries in GROUPS:
        items = [
            {"title": label, "icon": icon, "link": reverse(f"admin:{app}_{model}_changelist")}
            for label, icon, app, model in entries
            if request.user.has_perm(f"{app}.view_{model}")
        ]
        if items:
            groups.append({"title": title, "separator": True, "items": items})
    return groups


def find_by_id(request: HttpRequest, term: str) -> list[SearchResult]:
    """The one row whose id ``term`` is: an id's prefix says what it is of."""
    term = term.strip()
    prefix = term.partition("_")[0]
    if len(term) > ID_LENGTH or "\0" in term:
        return []
    for model, model_admin in admin.site._registry.items():
        key = model._meta.pk
        if isinstance(key, IdField) and key.prefix == prefix and model_admin.has_view_permission(request):
            if not model._default_manager.filter(pk=term).exists():
                return []
            link = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[term])
            return [SearchResult(title=term, description=model._meta.verbose_name, link=link, icon="tag")]
    return []
