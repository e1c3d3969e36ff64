"""The sidebar of the admin, its search for users and ids, and the pages 403 and 404."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views import defaults
from unfold.dataclasses import SearchResult

from config.kernel.ids import ID_LENGTH
from config.staff.base import model_of, page_of, users_named

TERM_MAX_CHARS = 254
HITS_MAX = 20
SUPERUSERS_NAMED = 3


def sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """The pages that the signed-in person may see."""
    pages = [("Dashboard", "dashboard", "admin:index", ())] + [
        page for page in settings.STAFF_PAGES if any(map(request.user.has_perm, page[3]))
    ]
    first = [{"title": label, "icon": icon, "link": reverse(page)} for label, icon, page, _ in pages]
    groups: list[dict[str, Any]] = [{"items": first}]
    # The address of such a page may begin with that of a list, which Unfold would mark too.
    mark = {"active": False} if request.path in {reverse(page) for _, _, page, _ in settings.STAFF_PAGES} else {}
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


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """It names superusers, who can grant access; only staff see it."""
    if not request.path_info.startswith("/admin/"):
        return defaults.permission_denied(request, exception)
    users = get_user_model()._default_manager.filter(is_superuser=True, is_active=True).order_by("pk")
    names = [user.get_username() for user in users[:SUPERUSERS_NAMED]] if request.user.is_staff else []
    return render(request, "staff/forbidden.html", {"names": names}, status=403)


def missing(request: HttpRequest, exception: Exception) -> HttpResponse:
    if not request.path_info.startswith("/admin/"):
        return defaults.page_not_found(request, exception)
    return render(request, "staff/missing.html", status=404)
