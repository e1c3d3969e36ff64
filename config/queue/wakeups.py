"""Wake-ups: one small Redis message after a commit says which runs have new events, to the processes with open streams.

A wake-up may be lost: processes that hold streams also look by themselves now and then. Nothing here raises.
"""

from __future__ import annotations

import logging
from functools import cache
from urllib.parse import urlsplit

import redis
from django.conf import settings
from django.db import transaction

from config.queue.publisher import Source, publisher
from config.redis import client

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
# While no process listens to any run, wake-ups are gathered for longer.
GATHER_SECONDS = 0.01
UNHEARD_GATHER_SECONDS = 0.1


def channel(url: str) -> str:
    """Messages reach all databases of a server, so the channel's name separates services that share a server."""
    return f"run-events:{urlsplit(url).path.strip('/')}"


def after_commit(*run_ids: str) -> None:
    """Announce new events of these runs once the surrounding transaction is committed."""
    transaction.on_commit(lambda: publisher.put(source, run_ids), robust=True)


@cache
def connection() -> redis.Redis:
    return client(reconnect=True)


def send(items: list[tuple[str, ...]]) -> None:
    run_ids = {run_id for item in items for run_id in item}
    listeners = int(connection().publish(channel(settings.CACHE_REDIS_URL), " ".join(run_ids)))
    source.interval_seconds = GATHER_SECONDS if listeners else UNHEARD_GATHER_SECONDS


def failed(error: Exception) -> None:
    logger.info("no wake-ups for streams for %g s (%s)", PAUSE_SECONDS, type(error).__name__)


source = Source(send, UNHEARD_GATHER_SECONDS, PAUSE_SECONDS, failed)
