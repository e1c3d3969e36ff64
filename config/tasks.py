"""Scheduled tasks that remove expired rows of the shared layer. An app's tasks belong in the app."""

from typing import Any

from celery import shared_task
from celery.signals import worker_shutting_down
from django.contrib.sessions.models import Session

from config.api import idempotency
from config.database import batches
from config.kernel import clock
from config.queue import jobs


@shared_task(name="api.prune_idempotency")
def prune_idempotency() -> None:
    jobs.run("prune-idempotency", idempotency.prune)


@shared_task(name="api.prune_sessions")
def prune_sessions() -> None:
    """Delete expired sessions of the admin, which are few."""
    jobs.run("prune-sessions", lambda: Session.objects.filter(expire_date__lt=clock.now()).delete()[0])


@worker_shutting_down.connect
def stop_jobs(**kwargs: Any) -> None:
    batches.stopping.set()
