"""Signing in to the admin is throttled by address: after ADMIN_SIGN_IN_FAILURES wrong passwords an address is locked
for ADMIN_SIGN_IN_LOCK_SECONDS (django-axes counts, in the database).
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from config.api import ratelimit

NO_ADDRESS = "0.0.0.0"  # noqa: S104 - those without an address are counted together, not let through


def client_ip(request: HttpRequest) -> str:
    """The address as the rate limits see it: only TRUSTED_PROXIES are believed, and an IPv6 /64 is one."""
    address = ratelimit.client_address(request).partition("/")[0]
    return NO_ADDRESS if address == "unknown" else address


def locked(request: HttpRequest, response: HttpResponse | None = None, credentials: Any = None) -> HttpResponse:
    seconds = settings.ADMIN_SIGN_IN_LOCK_SECONDS
    context = {"minutes": -(-seconds // 60)}
    answer = render(request, "staff/locked.html", context, status=429)
    answer["Retry-After"] = str(seconds)
    return answer
