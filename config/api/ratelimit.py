"""What the rate limits count: callers by surface, and addresses. ``config.limits.window`` counts."""

import ipaddress
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from config.kernel.errors import RateLimited
from config.limits.window import Bucket, Verdict, charge


def charge_caller(request: HttpRequest, *buckets: Bucket) -> None:
    """Charge a known caller. Raises RateLimited. The headers show the nearest limit, also of an earlier charge."""
    verdict = charge(*buckets)
    limited = [each for each in (verdict, verdict_of(request)) if each is not None and each.limit]
    nearest = min(limited, key=lambda each: each.remaining, default=verdict)
    request.rate_limit_verdict = nearest if verdict.allowed else verdict  # type: ignore[attr-defined]
    refuse_if_over(verdict)


def requests_of(surface: str, user: Any) -> Bucket:
    """All keys and tokens of a user count together."""
    limit = settings.RATE_LIMIT_SESSION if surface == "session" else settings.RATE_LIMIT_PUBLIC
    return Bucket(f"{surface}:{user.pk}", limit)


def run_starts_of(surface: str, user: Any) -> Bucket:
    return Bucket(f"run-starts:{surface}:{user.pk}", settings.RATE_LIMIT_RUN_STARTS)


def charge_address(request: HttpRequest) -> Verdict:
    """Charge an unknown caller's address. Never raises: the calling code decides on the answer."""
    verdict = charge(Bucket(f"address:{address_of(request.META)}", settings.RATE_LIMIT_UNAUTHENTICATED))
    request.rate_limit_verdict = verdict  # type: ignore[attr-defined]
    return verdict


def refuse_if_over(verdict: Verdict) -> None:
    if not verdict.allowed:
        raise RateLimited(headers=verdict.headers())


def verdict_of(request: HttpRequest) -> Verdict | None:
    return getattr(request, "rate_limit_verdict", None)


def address_of(environ: Mapping[str, Any]) -> str:
    """The client's address as the outermost of TRUSTED_PROXIES saw it; for IPv6 the subscriber's /64 network."""
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
