"""Clients of the service's Redis. Each client has the service's time-outs (BROKER_TIMEOUT_SECONDS).

The package redis is imported with the first client: it takes a sixth of the time of a command that needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.conf import settings

if TYPE_CHECKING:
    import redis
    import redis.asyncio


def client(url: str | None = None, *, reconnect: bool = False, **options: Any) -> redis.Redis:
    """A client with its own pool. ``url`` defaults to CACHE_REDIS_URL. Commands raise redis.RedisError.

    With ``reconnect``, a command is repeated once if the connection was closed, for example by a restart of Redis. A
    command that timed out is never repeated.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    retry = Retry(NoBackoff(), int(reconnect), supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(url or settings.CACHE_REDIS_URL, retry=retry, **_time_outs(), **options)


def async_client(url: str | None = None) -> redis.asyncio.Redis:
    """Like ``client``, for code on an event loop."""
    import redis.asyncio

    return redis.asyncio.Redis.from_url(url or settings.CACHE_REDIS_URL, **_time_outs())


def failures() -> tuple[type[Exception], ...]:
    """What commands raise while Redis is away, or if its URL is not valid. For ``except``, which needs it only then."""
    from redis import RedisError

    return RedisError, OSError, ValueError


def _time_outs() -> dict[str, Any]:
    seconds = settings.BROKER_TIMEOUT_SECONDS
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds}
