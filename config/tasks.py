"""The Celery tasks of the scheduled jobs (JOBS of the settings). An app's other tasks are in the app."""

from celery import shared_task
from celery.signals import worker_ready, worker_shutting_down
from django.conf import settings
from django.contrib.sessions.models import Session
from django.utils.module_loading import import_string

from config.database import batches
from config.kernel import clock
from config.queue import jobs, publisher


def declare(job: str, task: str, work: str) -> None:
    @shared_task(name=task)
    def run() -> None:
        jobs.run(job, import_string(work))


for job, (task, work, _) in settings.JOBS.items():
    declare(job, task, work)


def prune_sessions() -> int:
    """Delete expired sessions of the admin, which are few."""
    return Session.objects.filter(expire_date__lt=clock.now()).delete()[0]


worker_ready.connect(lambda **kwargs: publisher.metrics.put(None), weak=False)
worker_shutting_down.connect(lambda **kwargs: batches.stopping.set(), weak=False)
