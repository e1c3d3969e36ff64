"""What the rate limits count: callers by surface, and addresses. ``config.limits.window`` counts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from config.kernel.errors import RateLimited
from config.limits.window import Bucket, Verdict, charge

# Requests per minute of a server key, for each of its scopes.
RATE_LIMIT_SERVER_KEYS = 600
# Test events per minute of a user.
RATE_LIMIT_WEBHOOK_TESTS = 10


def charge_user(request: HttpRequest, surface: str, user: Any, *, run_start: bool = False) -> None:
    """Charge a known caller. All keys and tokens of a user count together. Raises RateLimited."""
    limit = settings.RATE_LIMIT_SESSION if surface == "session" else settings.RATE_LIMIT_PUBLIC
    run_starts = [_run_starts(surface, user)] if run_start else []
    _charge(request, Bucket(f"{surface}:{user.pk}", limit), *run_starts)


def charge_run_start(request: HttpRequest, surface: str, user: Any) -> None:
    """Charge the start of a run within a request that ``charge_user`` has charged already. Raises RateLimited."""
    _charge(request, _run_starts(surface, user))


def _run_starts(surface: str, user: Any) -> Bucket:
    return Bucket(f"run-starts:{surface}:{user.pk}", settings.RATE_LIMIT_RUN_STARTS)


def charge_webhook_test(request: HttpRequest, user: Any) -> None:
    """Charge a test event within a request that ``charge_user`` has charged already. Raises RateLimited."""
    _charge(request, Bucket(f"webhook-tests:{user.pk}", RATE_LIMIT_WEBHOOK_TESTS))


def charge_server_key(request: HttpRequest, key: Any, scope: str) -> None:
    """Charge the app's backend. Raises RateLimited."""
    _charge(request, Bucket(f"server-key:{scope}:{key.pk}", RATE_LIMIT_SERVER_KEYS))


def _charge(request: HttpRequest, *buckets: Bucket) -> None:
    request.rate_limit_verdict = verdict = charge(*buckets)  # type: ignore[attr-defined]
    refuse_if_over(verdict)


def charge_address(request: HttpRequest) -> Verdict:
    """Charge an unknown caller's address. Never raises: the calling code decides on the answer."""
    verdict = charge(Bucket(f"address:{address_of(request.META)}", settings.RATE_LIMIT_UNAUTHENTICATED))
    request.rate_limit_verdict = verdict  # type: ignore[attr-defined]
    return verdict


def charge_page(request: HttpRequest) -> Verdict:
    """Charge an address for a page. Never raises: the calling code decides on the answer."""
    return charge(Bucket(f"pages:{address_of(request.META)}", settings.RATE_LIMIT_PAGES))


def refuse_if_over(verdict: Verdict) -> None:
    if not verdict.allowed:
        raise RateLimited(headers=verdict.headers())


def verdict_of(request: HttpRequest) -> Verdict | None:
    return getattr(request, "rate_limit_verdict", None)


def address_of(environ: Mapping[str, Any]) -> str:
    """The client's address as the outermost of TRUSTED_PROXIES saw it; of an IPv6 client the /64, which one subscriber
    has. ``environ`` is that of WSGI.
    """
    hops = [environ.get("REMOTE_ADDR", "")]
    if settings.TRUSTED_PROXIES:
        forwarded = environ.get("HTTP_X_FORWARDED_FOR", "").split(",")
        hops = [hop.strip() for hop in forwarded if hop.strip()] + hops
    text = hops[max(0, len(hops) - 1 - settings.TRUSTED_PROXIES)]
    if text.startswith("["):  # some proxies add the port
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address), 64), strict=False))
    return str(address)
