"""Ends the sessions of staff: ADMIN_SESSION_HOURS after the sign-in, or after ADMIN_SESSION_IDLE_MINUTES without a
request (``SESSION_COOKIE_AGE`` and ``SESSION_SAVE_EVERY_REQUEST`` in the settings).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib.auth import logout
from django.contrib.auth.signals import user_logged_in
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponseBase

from config.kernel import clock

SIGNED_IN_AT = "signed_in_at"


@receiver(user_logged_in, dispatch_uid="config.staff.sessions")
def note_sign_in(request: HttpRequest, **kwargs: Any) -> None:
    request.session[SIGNED_IN_AT] = clock.now().timestamp()


class SessionAgeMiddleware:
    """For pages only: after Django's middleware for sessions and users."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if request.path_info.startswith("/admin/") and request.user.is_authenticated:
            age = clock.now().timestamp() - request.session.get(SIGNED_IN_AT, 0)
            if age > settings.ADMIN_SESSION_HOURS * 3600:
                logout(request)
        return self.get_response(request)
