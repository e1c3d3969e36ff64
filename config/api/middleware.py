"""Middleware. What the API does not need is for pages only: sessions, log-in, messages, Content-Security-Policy."""

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib.auth import middleware as auth
from django.contrib.messages import middleware as messages
from django.contrib.sessions import middleware as sessions
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from config.api import metrics_page, probes, ratelimit
from config.api.errors import answer_to, error_response, is_api_path, plain_response
from config.api.viewsets import is_plausible_id
from config.limits.window import Bucket, charge
from config.telemetry import logs, tracing
from config.telemetry.metrics import Counter, Histogram

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# The prefixes of signed addresses: their senders have no other credential.
UPLOADS, FILES = "/uploads/", "/files/"
# By the beginning of the path: what the log says of an error that is our fault. The views of these paths are not DRF's,
# but their errors have the envelope too.
FAILURES = {UPLOADS: "an upload failed", FILES: "a download failed", "/api/callbacks/": "a callback failed"}
# Far more than the two cookies of the admin need.
COOKIES_MAX_CHARS = 8 * 1024


class Middleware:
    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response


class RequestIdMiddleware(Middleware):
    """``X-Request-Id``: the caller's, or a new one. Log lines have it, and the id of the run in the path."""

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        given = request.META.get("HTTP_X_REQUEST_ID", "")
        name = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        # Not reset afterwards: Django logs a failed answer after all middleware. The next request sets its own.
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
request_seconds = Histogram("http_request_seconds", "Time from the head of a request to its answer.", ["route"])


PROBES = {"/livez": probes.livez, "/readyz": probes.readyz, "/metrics": metrics_page.page}


class MeasureMiddleware(Middleware):
    """Counts and traces every request except probes and scrapes. A span is within the trace that the client names.

    Probes and scrapes are answered here, before the checks of host name and scheme: inside a network, they use the
    process's own address and plain http.
    """

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if probe := PROBES.get(request.path_info):
            return probe(request)
        started = time.perf_counter()
        parent, about = tracing.parent_of(request.headers), {"request.id": logs.request_id.get()}
        with tracing.span(str(request.method), kind="SERVER", parent=parent, **about) as span:
            response = self.get_response(request)
            # The pattern, not the path: callers can send any path, and any method.
            route = request.resolver_match.route if request.resolver_match else "(none)"
            if span is not None:
                span.update_name(f"{request.method} {route}")
                span.set_attributes({"http.route": route, "http.response.status_code": response.status_code})
        method = request.method if request.method in METHODS else "(other)"
        requests.labels(method, route, response.status_code).inc()
        request_seconds.labels(route).observe(time.perf_counter() - started)
        return response


# A page may load only our own files. Alpine, in the admin, compiles the text of attributes; all pages use inline
# styles. The pages of the documentation, which are built before the service runs, have inline scripts.
_OWN = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'; script-src 'self'"
)
PAGE_POLICIES = {"/admin/": f"{_OWN} 'unsafe-eval'", "/api/docs": _OWN, "/docs": f"{_OWN} 'unsafe-inline'"}


class PagePolicyMiddleware(Middleware):
    """``Content-Security-Policy`` of pages that libraries render. The service's own pages set theirs."""

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        for path, policy in PAGE_POLICIES.items():
            if request.path_info.startswith(path):
                response["Content-Security-Policy"] = policy
        return response


def pages_only(middleware: Any) -> Any:
    """Django's middleware, skipped under /api, where no caller has a cookie."""

    class PagesOnly(middleware):
        def __call__(self, request: HttpRequest) -> HttpResponseBase:
            return self.get_response(request) if is_api_path(request.path_info) else super().__call__(request)

    return PagesOnly


SessionMiddleware = pages_only(sessions.SessionMiddleware)
AuthenticationMiddleware = pages_only(auth.AuthenticationMiddleware)
MessageMiddleware = pages_only(messages.MessageMiddleware)


class PageLimitMiddleware(Middleware):
    """Limits pages as the API is limited: the size of a body before any code reads it, and the requests of an address,
    except those to signed addresses. Uploads have a limit of their own. Cookies, which the API does not use, are
    limited because some versions of Python read them in a time that grows with the square of their length.
    """

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        path = request.path_info
        if is_api_path(path):
            request.META.pop("HTTP_COOKIE", None)
            return self.get_response(request)
        if len(request.META.get("HTTP_COOKIE", "")) > COOKIES_MAX_CHARS:
            return HttpResponse("The request's cookies are too large.\n", status=431, content_type="text/plain")
        if not path.startswith(UPLOADS) and int(request.META.get("CONTENT_LENGTH") or 0) > settings.API_MAX_BODY_BYTES:
            return plain_response(413)
        if not path.startswith((UPLOADS, FILES)):
            verdict = charge(Bucket(f"pages:{ratelimit.address_of(request.META)}", settings.RATE_LIMIT_PAGES))
            if not verdict.allowed:
                return plain_response(429, verdict.headers())
        return self.get_response(request)


class ApiErrorMiddleware(Middleware):
    """Under /api, replaces error pages of libraries by the envelope, and charges requests that no view has charged.
    Sets the headers of the rate limit there and in the answers to uploads. Answers the exceptions of FAILURES.
    """

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        verdict, is_api = ratelimit.verdict_of(request), is_api_path(request.path_info)
        is_json = response.get("Content-Type", "").startswith("application/json")
        if is_api and response.status_code >= 400 and not is_json:
            plain = error_response(response.status_code)
            for name in ("Allow", "WWW-Authenticate", "Retry-After"):
                if name in response:
                    plain[name] = response[name]
            response.close()
            response = plain
        if is_api and verdict is None:
            verdict = ratelimit.charge_address(request)
            # While the database is away, callers cannot be known. They learn of that, and not to wait for a minute.
            if not verdict.allowed and response.status_code != 503:
                response.close()
                response = error_response(429)
        if verdict is not None and (is_api or request.path_info.startswith(UPLOADS)):
            for name, value in verdict.headers().items():
                if name != "Retry-After" or response.status_code == 429:
                    response[name] = value
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        failure = next((text for path, text in FAILURES.items() if request.path_info.startswith(path)), None)
        return answer_to(error, failure) if failure else None
