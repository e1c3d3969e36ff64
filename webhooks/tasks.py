"""Celery tasks of webhooks, which wake dispatchers, and scheduled jobs. A lost message only causes a delay."""

from datetime import timedelta
from typing import Any

from celery import shared_task, signals
from django.conf import settings
from django.db.models import Exists, OuterRef

from config.database import batches
from config.kernel import clock
from config.queue import jobs, publisher
from webhooks import dispatcher, transitions
from webhooks.models import Delivery, Endpoint
from webhooks.outbox import DELIVER
from webhooks.services import remove_deliveries


def wake() -> None:
    """Wake this process's dispatcher."""
    dispatcher.own.wake()


deliver_due = shared_task(name=DELIVER)(wake)
retry_due = shared_task(name=transitions.RETRY)(wake)  # its message has a countdown


def sweep() -> int:
    """Nudge if there is work: a message was lost, or a claim lapsed because its worker died."""
    if not any(transitions.anything_due()):
        return 0
    publisher.nudge(DELIVER)
    return 1


def prune() -> int:
    """Remove deliveries that finished WEBHOOK_RETENTION_DAYS ago, and deleted endpoints without deliveries."""
    cutoff = clock.now() - timedelta(days=settings.WEBHOOK_RETENTION_DAYS)
    old = Delivery.objects.filter(finished_at__isnull=False, finished_at__lt=cutoff).order_by("finished_at")
    left = Endpoint.objects.filter(~Exists(Delivery.objects.filter(endpoint=OuterRef("pk"))), deleted_at__lt=cutoff)

    def deliveries() -> int:
        return batches.in_batches(lambda: remove_deliveries(old))

    def endpoints() -> int:
        return batches.in_batches(lambda: batches.delete_batch(left))

    return jobs.stages("prune-webhooks", deliveries, endpoints)


@signals.worker_shutdown.connect
@signals.worker_process_shutdown.connect
def finish_attempts(**_: Any) -> None:
    """Wait for the open attempts, at most as long as an attempt may take."""
    dispatcher.own.stop(settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + dispatcher.RECORD_SECONDS)
