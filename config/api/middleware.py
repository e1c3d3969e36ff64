"""What every answer has, whoever gave it: a request id and, under /api, the error envelope and the rate limit's
headers. And what only pages need, which the API is spared.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib.auth import middleware as auth
from django.contrib.messages import middleware as messages
from django.contrib.sessions import middleware as sessions
from django.http import HttpRequest, HttpResponseBase

from config.api import metrics_page, probes, ratelimit
from config.api.errors import error_response, is_api_path
from config.api.viewsets import is_plausible_id
from config.telemetry import logs
from config.telemetry.metrics import Counter, Histogram

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Headers of a replaced answer that keep their meaning beside the envelope.
KEPT_HEADERS = ("Allow", "WWW-Authenticate", "Retry-After")


class RequestIdMiddleware:
    """``X-Request-Id``: the caller's if it is well-formed, else a fresh one; in every log line of the request, beside
    the run that its path names.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        given = request.META.get("HTTP_X_REQUEST_ID", "")
        name = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        # Left set afterwards: Django logs a failed answer only once all middleware is done. The next request sets its
        # own.
        logs.request_id.set(name)
        logs.run_id.set(logs.NONE)
        response = self.get_response(request)
        response["X-Request-Id"] = name
        return response

    def process_view(self, request: HttpRequest, view: object, args: object, kwargs: dict[str, Any]) -> None:
        if is_plausible_id(run_id := kwargs.get("runId", "")):
            logs.run_id.set(run_id)


METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
requests = Counter("http_requests", "Requests by route, never by path, and status.", ["method", "route", "status"])
request_seconds = Histogram("http_request_seconds", "From a request's head to its answer's.", ["route"])


class MeasureMiddleware:
    """Counts every request but probes and scrapes."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        begun = time.perf_counter()
        response = self.get_response(request)
        # The pattern, for anyone can make up paths; and methods.
        route = request.resolver_match.route if request.resolver_match else "(none)"
        method = request.method if request.method in METHODS else "(other)"
        requests.inc(str(method), route, str(response.status_code))
        request_seconds.observe(time.perf_counter() - begun, route)
        return response


class ProbeMiddleware:
    """Answers probes and scrapes before all checks of host name and scheme: those who send them know neither."""

    views: ClassVar[dict[str, Callable[[HttpRequest], HttpResponseBase]]] = {
        "/livez": probes.livez,
        "/readyz": probes.readyz,
        "/metrics": metrics_page.page,
    }

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        return self.views.get(request.path_info, self.get_response)(request)


# What a page may load and do: what is our own. Alpine, in the admin, makes functions of its attributes' text, and both
# pages style their elements one by one.
_OWN = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'; script-src 'self'"
)
PAGE_POLICIES = {"/admin/": f"{_OWN} 'unsafe-eval'", "/api/docs": _OWN}


class PagePolicyMiddleware:
    """``Content-Security-Policy`` of the pages that libraries make; the service's own set theirs."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        for path, policy in PAGE_POLICIES.items():
            if request.path_info.startswith(path):
                response["Content-Security-Policy"] = policy
        return response


class PagesOnly:
    """Of Django's middleware, what knows people by a cookie: no caller of the API has one, and each of its requests
    would pass all the same.
    """

    get_response: Any

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if is_api_path(request.path_info):
            return self.get_response(request)
        answer: HttpResponseBase = super().__call__(request)  # type: ignore[misc]
        return answer


class SessionMiddleware(PagesOnly, sessions.SessionMiddleware):
    pass


class AuthenticationMiddleware(PagesOnly, auth.AuthenticationMiddleware):
    pass


class MessageMiddleware(PagesOnly, messages.MessageMiddleware):
    pass


class ApiErrorMiddleware:
    """Under /api, turns error pages of Django and of other middleware into the envelope, and charges what no view
    charged.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        if not is_api_path(request.path_info):
            return response
        if response.status_code >= 400 and not response.get("Content-Type", "").startswith("application/json"):
            plain = error_response(response.status_code)
            for name in KEPT_HEADERS:
                if name in response:
                    plain[name] = response[name]
            response.close()
            response = plain
        verdict = ratelimit.verdict_of(request)
        if verdict is None:
            verdict = ratelimit.charge_address(request)
            if not verdict.allowed:
                response.close()
                response = error_response(429)
        for name, value in verdict.headers().items():
            response[name] = value
        return response
