"""The sidebar of the admin, and its search for users and ids."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from unfold.dataclasses import SearchResult

from config.kernel.ids import ID_LENGTH
from config.staff.base import model_of, page_of, users_named

TERM_MAX_CHARS = 254
HITS_MAX = 20


def sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """The pages that the signed-in person may see."""
    groups: list[dict[str, Any]] = [
        {"items": [{"title": "Dashboard", "icon": "dashboard", "link": reverse("admin:index")}]}
    ]
    groups[0]["items"] += [
        {"title": label, "icon": icon, "link": reverse(page)}
        for label, icon, page, permissions in settings.STAFF_PAGES
        if any(map(request.user.has_perm, permissions))
    ]
    # The address of such a page may begin with that of a list, which Unfold would mark too.
    elsewhere = request.path in {reverse(page) for _, _, page, _ in settings.STAFF_PAGES}
    mark = {"active": False} if elsewhere else {}
    for title, entries in settings.STAFF_NAVIGATION.items():
        items = [
            {"title": label, "icon": icon, "link": reverse(f"admin:{model.replace('.', '_')}_changelist")} | mark
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


def find(request: HttpRequest) -> HttpResponse:
    """The page of the only hit, or a list of hits."""
    term = request.GET.get("q", "").strip()[:TERM_MAX_CHARS].replace("\0", "")
    hits = [(f"{hit.description} {hit.title}", hit.link) for hit in find_by_id(request, term)]
    if not hits and term and request.user.has_perm("auth.view_user"):
        hits = _people(term)
    if len(hits) == 1:
        return HttpResponseRedirect(hits[0][1])
    context = admin.site.each_context(request) | {"title": "Search", "term": term, "hits": hits}
    return TemplateResponse(request, "staff/found.html", context)


def _people(term: str) -> list[tuple[str, str]]:
    """Users with this name, e-mail address or number; without any, users whose names begin so."""
    users = get_user_model()._default_manager
    keys = users_named(term)[:HITS_MAX]
    named = users.filter(pk__in=keys) if keys else users.filter(username__startswith=term)
    found = named.order_by("username")[:HITS_MAX]
    return [(f"{user.get_username()} {user.email}".strip(), reverse("person", args=[user.pk])) for user in found]
