"""Periodic tasks of credits, started by beat."""

from celery import shared_task

from config.queue import jobs
from credits import expiry


@shared_task(name="credits.expire_grants")
def expire_grants() -> None:
    jobs.run("expire-grants", lambda: sum(1 for _ in expiry.expire_grants()))
