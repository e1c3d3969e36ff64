"""Window: a number of requests per minute, exact over all processes, because Redis counts them with its own time.

While Redis is not available, requests pass and are counted, because a limiter must not stop the API.
"""

from dataclasses import dataclass
from typing import NamedTuple

from config import redis
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


@dataclass(frozen=True)
class Verdict:
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
