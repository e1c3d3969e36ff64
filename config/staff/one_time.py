"""The one-time password that ``make run`` prints. It opens a page of the admin that asks for a new password.

It is Django's token for a forgotten password: signed, not stored, valid for PASSWORD_RESET_TIMEOUT (three days), and
invalid as soon as the user has signed in or has a password.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.contrib.auth import BACKEND_SESSION_KEY, get_user_model, login
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.forms import SetPasswordForm
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from unfold.widgets import UnfoldAdminPasswordWidget

from config.kernel import clock

BACKEND = "config.staff.one_time.OneTimeBackend"


class Tokens(PasswordResetTokenGenerator):
    key_salt = "config.staff.one_time"


tokens = Tokens()


class OneTimeBackend(ModelBackend):
    """Signs in staff who have no password yet."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> Any:
        users = get_user_model()._default_manager
        user: Any = users.filter(username=username, is_active=True, is_staff=True).first()
        if user is None or user.has_usable_password() or not tokens.check_token(user, password):
            return None
        # A guarded update: of two concurrent sign-ins with one token only one succeeds.
        used = users.filter(pk=user.pk, last_login=user.last_login).update(last_login=clock.now())
        return user if used else None


class OwnPasswordForm(SetPasswordForm):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for field in self.fields.values():
            field.widget = UnfoldAdminPasswordWidget(attrs={"autocomplete": "new-password"})


class OwnPasswordMiddleware:
    """Redirects a user who signed in with a one-time password until the user has chosen a new one."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if request.path_info.startswith("/admin/") and request.session.get(BACKEND_SESSION_KEY) == BACKEND:
            choose_at = reverse("own-password")
            if request.path_info not in (choose_at, reverse("admin:logout")):
                return HttpResponseRedirect(choose_at)
        return self.get_response(request)


@never_cache
def choose(request: HttpRequest) -> HttpResponse:
    """The page that asks for a new password."""
    user: Any = request.user
    if request.session.get(BACKEND_SESSION_KEY) != BACKEND or not user.is_authenticated:
        return HttpResponseRedirect(reverse("admin:index"))
    form = OwnPasswordForm(user, request.POST if request.method == "POST" else None)
    if form.is_valid():
        login(request, form.save(), backend="django.contrib.auth.backends.ModelBackend")
        return HttpResponseRedirect(reverse("admin:index"))
    context = admin.site.each_context(request) | {"title": "Choose a password", "form": form}
    return TemplateResponse(request, "staff/own_password.html", context)
