"""The sidebar of the admin, and its search for users and ids."""

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from config.kernel.ids import ID_LENGTH
from config.staff.base import model_of, page_of, users_named

TERM_MAX_CHARS = 254
HITS_MAX = 20


def sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """The pages and lists that the signed-in person may see."""
    may = request.user.has_perm
    seen = [entry for entry in settings.STAFF_PAGES if not entry[3] or any(map(may, entry[3]))]
    pages = [{"title": label, "icon": icon, "link": reverse(page)} for label, icon, page, _ in seen]
    groups: list[dict[str, Any]] = [{"items": pages}]
    for title, entries in settings.STAFF_NAVIGATION.items():
        items = [
            {"title": label, "icon": icon, "link": reverse(f"admin:{model.replace('.', '_')}_changelist")}
            for label, icon, model in entries
            if may(model.replace(".", ".view_"))
        ]
        if items:
            groups.append({"title": title, "separator": True, "items": items})
    return groups


def find(request: HttpRequest) -> HttpResponse:
    """The page of the only hit, or a list of hits."""
    term = request.GET.get("q", "").strip()[:TERM_MAX_CHARS].replace("\0", "")
    hits = _by_id(request, term)
    if not hits and term and request.user.has_perm("auth.view_user"):
        hits = _people(term)
    if len(hits) == 1:
        return HttpResponseRedirect(hits[0][1])
    context = admin.site.each_context(request) | {"title": "Search", "term": term, "hits": hits}
    return TemplateResponse(request, "staff/found.html", context)


def _by_id(request: HttpRequest, key: str) -> list[tuple[str, str]]:
    """The row with this id, if the signed-in person may view it."""
    model = model_of(key) if len(key) <= ID_LENGTH else None
    if model is None or not admin.site.get_model_admin(model).has_view_permission(request):
        return []
    return [(key, page_of(model, key))] if model._default_manager.filter(pk=key).exists() else []


def _people(term: str) -> list[tuple[str, str]]:
    """Users with this name, e-mail address or number; without any, users whose names begin so."""
    users = get_user_model()._default_manager
    keys = users_named(term)
    named = users.filter(pk__in=keys) if keys else users.filter(username__startswith=term)
    found = named.order_by("username")[:HITS_MAX]
    return [(f"{user.get_username()} {user.email}".strip(), reverse("person", args=[user.pk])) for user in found]
