"""Housekeeping of the shared layer."""

from celery import shared_task
from django.contrib.sessions.models import Session

from config.api import clock, housekeeping, idempotency


@shared_task(name="api.prune_idempotency")
def prune_idempotency() -> None:
    housekeeping.run("prune-idempotency", idempotency.prune)


@shared_task(name="api.prune_sessions")
def prune_sessions() -> None:
    """Sessions of the admin that have expired."""
    housekeeping.run("prune-sessions", _prune_sessions)


def _prune_sessions() -> int:
    expired = Session.objects.filter(expire_date__lt=clock.now()).order_by("expire_date")
    return housekeeping.in_batches(lambda: housekeeping.delete_batch(expired))
