"""Connections to the service's Redis, all with the service's time-outs."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry


def client(url: str | None = None, *, reconnect: bool = False, **options: Any) -> redis.Redis:
    """A client with a pool of its own. ``url`` defaults to CACHE_REDIS_URL. Raises redis.RedisError when used.

    ``reconnect`` repeats a command once on a connection that a restart of Redis closed. A time-out is never repeated.
    """
    retry = Retry(NoBackoff(), int(reconnect), supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(url or settings.CACHE_REDIS_URL, retry=retry, **_time_outs(), **options)


def async_client(url: str | None = None) -> redis.asyncio.Redis:
    """As ``client``, for code on an event loop."""
    return redis.asyncio.Redis.from_url(url or settings.CACHE_REDIS_URL, **_time_outs())


def _time_outs() -> dict[str, Any]:
    seconds = settings.BROKER_TIMEOUT_SECONDS
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds}
