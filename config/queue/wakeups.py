"""Redis messages that name runs with new events to processes with open streams, which also query: one may be lost."""

from urllib.parse import urlsplit

from django.conf import settings
from django.db import transaction

from config import redis
from config.queue.publisher import Source

# Seconds between two messages. The second value applies while no process listens.
GATHER_SECONDS = 0.01
IDLE_GATHER_SECONDS = 0.1


def channel(url: str) -> str:
    """The channel of this service, with its database number: a message of Redis reaches all databases of a server."""
    return f"run-events:{urlsplit(url).path.strip('/')}"


def after_commit(*run_ids: str) -> None:
    """Announce new events of these runs after the commit of the current transaction."""
    transaction.on_commit(lambda: source.put(run_ids), robust=True)


def send(items: list[tuple[str, ...]]) -> None:
    run_ids = {run_id for item in items for run_id in item}
    listeners = redis.ask(lambda client: client.publish(channel(settings.CACHE_REDIS_URL), " ".join(run_ids)))
    source.interval_seconds = GATHER_SECONDS if listeners else IDLE_GATHER_SECONDS


source = Source(send, IDLE_GATHER_SECONDS)
