"""Ends the sessions of staff: ADMIN_SESSION_HOURS after the sign-in, or after ADMIN_SESSION_IDLE_MINUTES without a
request (``SESSION_COOKIE_AGE`` and ``SESSION_SAVE_EVERY_REQUEST`` in the settings).
"""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.contrib.auth import logout
from django.http import HttpRequest, HttpResponseBase

from config.kernel import clock

# The key in the session; the value is in seconds since the epoch.
BEGUN_AT = "begun_at"


class SessionAgeMiddleware:
    """For pages only: after Django's middleware for sessions and users. A session begins with its first request."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if request.path_info.startswith("/admin/") and request.user.is_authenticated:
            now = clock.now().timestamp()
            if now - request.session.setdefault(BEGUN_AT, now) > settings.ADMIN_SESSION_HOURS * 3600:
                logout(request)
        return self.get_response(request)
