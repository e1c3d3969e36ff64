"""The sidebar of the admin, and its search by id."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from unfold.dataclasses import SearchResult

from config.kernel.ids import ID_LENGTH
from config.staff.base import model_of, page_of


def sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """The pages that the signed-in person may see."""
    groups: list[dict[str, Any]] = [
        {"items": [{"title": "Dashboard", "icon": "dashboard", "link": reverse("admin:index")}]}
    ]
    for title, entries in settings.STAFF_NAVIGATION:
        items = [
            {"title": label, "icon": icon, "link": reverse(f"admin:{model.replace('.', '_')}_changelist")}
            for label, icon, model in entries
            if request.user.has_perm(model.replace(".", ".view_"))
        ]
        if items:
            groups.append({"title": title, "separator": True, "items": items})
    return groups


def find_by_id(request: HttpRequest, term: str) -> list[SearchResult]:
    """The row with the id ``term``, if the signed-in user may view it."""
    key = term.strip()
    model = model_of(key) if len(key) <= ID_LENGTH and "\0" not in key else None
    if model is None or not admin.site.get_model_admin(model).has_view_permission(request):
        return []
    if not model._default_manager.filter(pk=key).exists():
        return []
    return [SearchResult(title=key, description=model._meta.verbose_name, link=page_of(model, key), icon="tag")]
