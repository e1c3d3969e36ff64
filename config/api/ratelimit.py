"""Rate limits: requests per minute of callers, by surface, and of addresses. They are exact over all processes, because
Redis counts the requests with its own time. While Redis is not available, requests pass and are counted.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.conf import settings
from django.http import HttpRequest

from config import redis
from config.kernel.errors import RateLimited
from config.telemetry.metrics import Counter

unlimited = Counter("ratelimit_failures", "Rate-limit checks that Redis failed; these requests pass without a limit.")

# A bucket is the list of the times of its requests within the last minute, so that no minute holds more than the limit,
# wherever it begins. All buckets of a request are charged or none. KEYS: buckets. ARGV: their limits. Returns {allowed,
# then per bucket: its requests, and the seconds until the oldest and until the newest of them leave the window}.
SCRIPT = """
local window = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answer = {1}
for index, key in ipairs(KEYS) do
  local first = redis.call('LINDEX', key, 0)
  while first and tonumber(first) <= now - window do
    redis.call('LPOP', key)
    first = redis.call('LINDEX', key, 0)
  end
  if redis.call('LLEN', key) >= tonumber(ARGV[index]) then answer[1] = 0 end
end
for index, key in ipairs(KEYS) do
  if answer[1] == 1 then
    redis.call('RPUSH', key, string.format('%.0f', now))
    redis.call('PEXPIRE', key, window / 1000)
  end
  table.insert(answer, redis.call('LLEN', key))
  for _, place in ipairs({0, -1}) do
    local moment = redis.call('LINDEX', key, place) or now - window
    table.insert(answer, math.ceil((moment + window - now) / 1000000))
  end
end
return answer
"""


class Bucket(NamedTuple):
    """Requests that are counted together, and how many per minute are allowed; 0 means any number."""

    name: str
    limit: int


class Verdict(NamedTuple):
    """The state of the bucket that is nearest to its limit. ``limit`` 0: no limit applies. Times are in seconds."""

    allowed: bool
    limit: int = 0
    remaining: int = 0
    reset: int = 0
    retry_after: int = 0

    def headers(self) -> dict[str, str]:
        if not self.limit:
            return {}
        values = {"Limit": self.limit, "Remaining": self.remaining, "Reset": self.reset}
        headers = {f"X-RateLimit-{name}": str(value) for name, value in values.items()}
        return headers if self.allowed else headers | {"Retry-After": str(self.retry_after)}


def charge(*buckets: Bucket) -> Verdict:
    """Charge one request to every bucket, or to none if one of them has reached its limit."""
    limited = [bucket for bucket in buckets if bucket.limit]
    if not limited:
        return Verdict(True)
    keys, limits = [f"ratelimit:{bucket.name}" for bucket in limited], [bucket.limit for bucket in limited]
    answer = redis.run(SCRIPT, keys, limits)
    if answer is None:
        unlimited.inc()
        return Verdict(True, min(limits), min(limits))
    verdicts = [
        Verdict(bool(answer[0]), limit, max(0, limit - count), until_full, max(1, until_one))
        for limit, count, until_one, until_full in zip(limits, answer[1::3], answer[2::3], answer[3::3], strict=True)
    ]
    return min(verdicts, key=lambda verdict: (verdict.remaining, -verdict.retry_after))


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
