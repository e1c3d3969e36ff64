"""The pages 403 and 404 of the admin, with a way back. Other pages have Django's own."""

from __future__ import annotations

from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views import defaults

NAMED_MAX = 3


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """It names superusers, who can grant access; only staff see it."""
    if not request.path_info.startswith("/admin/"):
        return defaults.permission_denied(request, exception)
    users = get_user_model()._default_manager.filter(is_superuser=True, is_active=True).order_by("pk")
    names = [user.get_username() for user in users[:NAMED_MAX]] if request.user.is_staff else []
    return render(request, "staff/forbidden.html", {"names": names}, status=403)


def missing(request: HttpRequest, exception: Exception) -> HttpResponse:
    if not request.path_info.startswith("/admin/"):
        return defaults.page_not_found(request, exception)
    return render(request, "staff/missing.html", status=404)
