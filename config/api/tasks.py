"""Housekeeping of the shared layer."""

from celery import shared_task

from config.api import idempotency


@shared_task(name="api.prune_idempotency")
def prune_idempotency() -> None:
    idempotency.prune()
