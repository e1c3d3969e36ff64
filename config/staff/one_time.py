"""The one-time password that ``make run`` prints. It opens a page of the admin that asks for a new password.

It is signed, not stored, valid for PASSWORD_RESET_TIMEOUT (three days), and invalid as soon as the user has a password.
Until then it signs in again, so that nobody is locked out who closes the page too early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import BACKEND_SESSION_KEY, get_user_model, login
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.forms import SetPasswordForm
from django.core.signing import BadSignature, TimestampSigner
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from unfold.widgets import UnfoldAdminPasswordWidget

BACKEND = "config.staff.one_time.OneTimeBackend"


def make(user: Any) -> str:
    return _signer(user).sign(str(user.pk))


def is_valid(user: Any, password: str | None) -> bool:
    try:
        return _signer(user).unsign(password or "", max_age=settings.PASSWORD_RESET_TIMEOUT) == str(user.pk)
    except BadSignature:
        return False


def _signer(user: Any) -> TimestampSigner:
    # An unusable password is random, and the user's own one replaces it.
    return TimestampSigner(salt=f"config.staff.one_time:{user.password}")


class OneTimeBackend(ModelBackend):
    """Signs in staff who have no password yet."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> Any:
        users = get_user_model()._default_manager
        user: Any = users.filter(username=username, is_active=True, is_staff=True).first()
        if user is None or user.has_usable_password() or not is_valid(user, password):
            return None
        return user


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
