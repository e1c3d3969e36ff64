"""Periodic tasks of credits, started by beat."""

from celery import shared_task

from config.queue import jobs
from credits import expiry, low


@shared_task(name="credits.expire_grants")
def expire_grants() -> None:
    jobs.run("expire-grants", lambda: sum(1 for _ in expiry.expire_grants()))


@shared_task(name="credits.report_low")
def report_low() -> None:
    jobs.run("sweep-low-credits", low.report)
