"""Clients of the service's Redis. Each client has the service's time-outs (BROKER_TIMEOUT_SECONDS)."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry


def client(url: str | None = None, *, reconnect: bool = False, **options: Any) -> redis.Redis:
    """A client with its own pool. ``url`` defaults to CACHE_REDIS_URL. Commands raise redis.RedisError.

    With ``reconnect``, a command is repeated once if the connection was closed, for example by a restart of Redis. A
    command that timed out is never repeated.
    """
    retry = Retry(NoBackoff(), int(reconnect), supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(url or settings.CACHE_REDIS_URL, retry=retry, **_time_outs(), **options)


def async_client(url: str | None = None) -> redis.asyncio.Redis:
    """Like ``client``, for code on an event loop."""
    return redis.asyncio.Redis.from_url(url or settings.CACHE_REDIS_URL, **_time_outs())


def _time_outs() -> dict[str, Any]:
    seconds = settings.BROKER_TIMEOUT_SECONDS
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds}
