"""Celery's side of webhooks: nudges, the sweep, pruning. Losing any message loses nothing but time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import shared_task, signals
from django.conf import settings

from config.api import broker, clock
from webhooks import claims, dispatcher
from webhooks.models import Attempt, Delivery, Endpoint
from webhooks.outbox import DELIVER

PRUNE_BATCH = 1000


@shared_task(name="webhooks.deliver_due", ignore_result=True)
def deliver_due() -> None:
    """Wake this process's dispatcher."""
    dispatcher.dispatcher().wake()


@shared_task(name="webhooks.retry_due", ignore_result=True)
def retry_due() -> None:
    """The same, by a message that was held back until a retry was due."""
    dispatcher.dispatcher().wake()


@shared_task(name="webhooks.sweep", ignore_result=True)
def sweep() -> None:
    """Nudge if anything is due: a message was lost, or a claim lapsed because its worker died."""
    if claims.anything_due():
        broker.nudge(DELIVER)


@shared_task(name="webhooks.prune", ignore_result=True)
def prune() -> int:
    """Remove deliveries finished WEBHOOK_RETENTION_DAYS ago, and deleted endpoints without any left.

    In batches, so no lock is held long. Returns how many deliveries.
    """
    cutoff = clock.now() - timedelta(days=settings.WEBHOOK_RETENTION_DAYS)
    removed = 0
    while True:
        old = list(
            Delivery.objects.filter(finished_at__isnull=False, finished_at__lt=cutoff)
            .order_by("finished_at")
            .values_list("pk", flat=True)[:PRUNE_BATCH]
        )
        if not old:
            break
        Attempt.objects.filter(delivery__in=old).delete()
        removed += Delivery.objects.filter(pk__in=old).delete()[0]
    Endpoint.objects.filter(deleted_at__lt=cutoff, deliveries=None).delete()
    return removed


@signals.worker_shutdown.connect
@signals.worker_process_shutdown.connect
def finish_attempts(**_: Any) -> None:
    dispatcher.stop()
