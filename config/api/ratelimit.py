"""Rate limits: a sliding window per caller in Redis, exact across processes.

While Redis is not available, requests pass without a limit, because the limiter must not stop the API. This is logged
and counted.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from config.kernel.errors import RateLimited
from config.redis import client, failures
from config.telemetry.metrics import Counter

logger = logging.getLogger(__name__)

unlimited = Counter("ratelimit_failures", "Rate-limit checks that Redis failed; these requests pass without a limit.")

# The pause after a failure of Redis: a stalled Redis costs one time-out, not one per request.
PAUSE_SECONDS = 5.0
# Requests per minute of a server key, for each of its scopes.
RATE_LIMIT_SERVER_KEYS = 600

# A sliding window: a bucket is the list of the times of its requests within the last minute, so that no minute holds
# more than the limit, wherever it begins. All buckets of a request are charged or none. The time is Redis' own, so web
# processes need not agree on it. KEYS: buckets. ARGV: their limits. Returns {allowed, then per bucket: its
# requests, and the microseconds until the oldest and until the newest of them leave the window}.
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
  table.insert(answer, (redis.call('LINDEX', key, 0) or now - window) + window - now)
  table.insert(answer, (redis.call('LINDEX', key, -1) or now - window) + window - now)
end
return answer
"""


@dataclass(frozen=True)
class Bucket:
    """Requests that are counted together, and how many a minute are allowed."""

    name: str
    limit: int


@dataclass(frozen=True)
class Verdict:
    """The state of the bucket that is nearest to its limit. ``limit`` 0: no limit applies."""

    allowed: bool
    limit: int = 0
    remaining: int = 0
    reset: int = 0
    retry_after: int = 0

    def headers(self) -> dict[str, str]:
        if not self.limit:
            return {}
        headers = {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(self.reset),
        }
        return headers if self.allowed else headers | {"Retry-After": str(self.retry_after)}


class Limiter:
    """The connection to Redis, with a circuit breaker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scripts: dict[str, Any] = {}
        self.closed_until = 0.0
        self.lock = threading.Lock()

    def charge(self, buckets: list[Bucket]) -> Verdict:
        """Take one request from every bucket, or from none if one of them is empty."""
        buckets = [bucket for bucket in buckets if bucket.limit]
        if not buckets:
            return Verdict(True)
        names = [f"ratelimit:{bucket.name}" for bucket in buckets]
        answer = self.run(SCRIPT, names, [bucket.limit for bucket in buckets])
        if answer is None:
            tightest = min(buckets, key=lambda bucket: bucket.limit)
            return Verdict(True, tightest.limit, tightest.limit)
        allowed = bool(answer[0])
        states = zip(buckets, answer[1::3], answer[2::3], answer[3::3], strict=True)
        verdicts = [_read(allowed, *state) for state in states]
        return min(verdicts, key=lambda verdict: (verdict.remaining, -verdict.retry_after))

    def run(self, source: str, keys: list[str], arguments: list[Any]) -> list[int] | None:
        """The answer of a Lua script; None while Redis is away."""
        if self.closed_until:
            with self.lock:
                if time.monotonic() < self.closed_until:
                    return None
                # This thread tries; the others let requests through until it succeeds.
                self.closed_until = time.monotonic() + PAUSE_SECONDS
        try:
            script = self.scripts.get(source)
            if script is None:
                script = self.scripts[source] = client(self.url, reconnect=True).register_script(source)
            answer: list[int] = script(keys=keys, args=arguments)
        except failures() as error:
            self.closed_until = time.monotonic() + PAUSE_SECONDS
            unlimited.inc()
            logger.warning("no rate limits for %g s: Redis failed (%s)", PAUSE_SECONDS, type(error).__name__)
            return None
        self.closed_until = 0.0
        return answer


def _read(allowed: bool, bucket: Bucket, count: int, until_one: int, until_full: int) -> Verdict:
    return Verdict(
        allowed,
        limit=bucket.limit,
        remaining=max(0, bucket.limit - count),
        reset=_seconds(until_full),
        retry_after=max(1, _seconds(until_one)),
    )


def _seconds(microseconds: int) -> int:
    return max(0, -(-microseconds // 1_000_000))


@lru_cache(maxsize=4)
def limiter_of(url: str) -> Limiter:
    return Limiter(url)


def run(source: str, keys: list[str], arguments: list[Any]) -> list[int] | None:
    """``Limiter.run``, for other limits per user."""
    return limiter_of(settings.CACHE_REDIS_URL).run(source, keys, arguments)


def charge(*buckets: Bucket) -> Verdict:
    return limiter_of(settings.CACHE_REDIS_URL).charge(list(buckets))


def charge_user(request: HttpRequest, surface: str, user: Any, *, run_start: bool = False) -> Verdict:
    """Charge a known caller. All keys and tokens of a user count together. Raises RateLimited."""
    limit = settings.RATE_LIMIT_SESSION if surface == "session" else settings.RATE_LIMIT_PUBLIC
    buckets = [Bucket(f"{surface}:{user.pk}", limit)]
    if run_start:
        buckets.append(_run_starts(surface, user))
    return _settle(request, charge(*buckets))


def charge_run_start(request: HttpRequest, surface: str, user: Any) -> Verdict:
    """Charge the start of a run within a request that ``charge_user`` has charged already. Raises RateLimited."""
    return _settle(request, charge(_run_starts(surface, user)))


def charge_server_key(request: HttpRequest, key: Any, scope: str) -> Verdict:
    """Charge the app's backend. Raises RateLimited."""
    return _settle(request, charge(Bucket(f"server-key:{scope}:{key.pk}", RATE_LIMIT_SERVER_KEYS)))


def _run_starts(surface: str, user: Any) -> Bucket:
    return Bucket(f"run-starts:{surface}:{user.pk}", settings.RATE_LIMIT_RUN_STARTS)


def charge_address(request: HttpRequest) -> Verdict:
    """Charge an unknown caller's address. Never raises: the calling code decides on the answer."""
    verdict = charge(Bucket(f"address:{client_address(request)}", settings.RATE_LIMIT_UNAUTHENTICATED))
    request.rate_limit_verdict = verdict  # type: ignore[attr-defined]
    return verdict


def charge_page(request: HttpRequest) -> Verdict:
    """Charge an address for a page. Never raises: the calling code decides on the answer."""
    return charge(Bucket(f"pages:{client_address(request)}", settings.RATE_LIMIT_PAGES))


def refuse_if_over(verdict: Verdict) -> None:
    if not verdict.allowed:
        raise RateLimited(headers=verdict.headers())


def _settle(request: HttpRequest, verdict: Verdict) -> Verdict:
    request.rate_limit_verdict = verdict  # type: ignore[attr-defined]
    refuse_if_over(verdict)
    return verdict


def verdict_of(request: HttpRequest) -> Verdict | None:
    return getattr(request, "rate_limit_verdict", None)


def client_address(request: HttpRequest) -> str:
    return address_of(request.META)


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
