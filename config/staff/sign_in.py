"""The throttle of sign-ins to the admin, which django-axes counts in the database, and the end of sessions."""

from typing import Any

from axes.handlers.database import AxesDatabaseHandler
from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth import logout
from django.db.models import F
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render

from config.api import ratelimit
from config.api.middleware import Middleware
from config.kernel import clock

NO_ADDRESS = "0.0.0.0"  # noqa: S104 - requests without an address share one count


class CountingHandler(AxesDatabaseHandler):
    """Counts an attempt before its password is checked, so that concurrent attempts cannot try more passwords."""

    def is_allowed(self, request: Any, credentials: dict[str, Any] | None = None) -> bool:
        if not super().is_allowed(request, credentials):
            return False
        super().user_login_failed(type(self), credentials or {}, request)
        request.sign_in_counted = True
        return not request.axes_locked_out

    def user_login_failed(self, sender: Any, credentials: dict[str, Any], request: Any = None, **kwargs: Any) -> None:
        if not getattr(request, "sign_in_counted", False):
            super().user_login_failed(sender, credentials, request, **kwargs)

    def user_logged_in(self, sender: Any, request: Any, user: Any, **kwargs: Any) -> None:
        super().user_logged_in(sender, request, user, **kwargs)
        if getattr(request, "sign_in_counted", False):
            counted = AccessAttempt.objects.filter(
                username=user.get_username(), ip_address=request.axes_ip_address, user_agent=request.axes_user_agent
            )
            counted.filter(failures_since_start__gt=0).update(failures_since_start=F("failures_since_start") - 1)
            counted.filter(failures_since_start=0).delete()


def client_ip(request: HttpRequest) -> str:
    """The address that the rate limits use: it depends on TRUSTED_PROXIES, and an IPv6 /64 network is one address."""
    address = ratelimit.address_of(request.META).partition("/")[0]
    return NO_ADDRESS if address == "unknown" else address


def locked(request: HttpRequest, response: HttpResponse | None = None, credentials: Any = None) -> HttpResponse:
    seconds = settings.ADMIN_SIGN_IN_LOCK_SECONDS
    answer = render(request, "staff/locked.html", {"minutes": -(-seconds // 60)}, status=429)
    answer["Retry-After"] = str(seconds)
    return answer


class SessionAgeMiddleware(Middleware):
    """Ends old sessions of staff. For pages only, after Django's middleware for sessions and users."""

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if request.path_info.startswith("/admin/") and request.user.is_authenticated:
            now = clock.now().timestamp()
            if now - request.session.setdefault("begun_at", now) > settings.ADMIN_SESSION_HOURS * 3600:
                logout(request)
        return self.get_response(request)
