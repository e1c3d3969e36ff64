"""Celery's side of chats and attachments. Losing a message loses nothing: the next one finds what is due."""

from celery import shared_task

from chats import attachments, purge
from config.api import housekeeping


@shared_task(name="chats.purge", ignore_result=True)
def purge_chats() -> None:
    housekeeping.run("purge-chats", purge.purge_chats)


@shared_task(name="chats.purge_attachments", ignore_result=True)
def purge_attachments() -> None:
    housekeeping.run("purge-attachments", purge.purge_attachments)


@shared_task(name="chats.expire_attachments", ignore_result=True)
def expire_attachments() -> None:
    housekeeping.run("expire-attachments", attachments.expire_attachments)
