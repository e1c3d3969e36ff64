"""Maintenance of credits, started by beat."""

from celery import shared_task

from credits import expiry


@shared_task(name="credits.expire_grants")
def expire_grants() -> None:
    expiry.expire_grants()
