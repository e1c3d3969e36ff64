"""The page of a user for staff; what it shows is in the function that STAFF_PERSON_PAGE names."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.utils.module_loading import import_string


def show(request: HttpRequest, user_id: int) -> HttpResponse:
    if not request.user.has_perm("auth.view_user"):
        raise PermissionDenied
    # A larger number than the database's integers is the id of nobody.
    user = get_object_or_404(get_user_model(), pk=min(user_id, 2**31 - 1))
    template, function = settings.STAFF_PERSON_PAGE
    context = admin.site.each_context(request) | {"title": "User", "subtitle": user.get_username()}
    return TemplateResponse(request, template, context | import_string(function)(request, user))
