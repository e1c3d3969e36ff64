"""Celery's side of attachments. Losing a message loses nothing: the next one finds what is due."""

from celery import shared_task

from chats import attachments
from config.api import housekeeping


@shared_task(name="chats.expire_attachments", ignore_result=True)
def expire_attachments() -> None:
    housekeeping.run("expire-attachments", attachments.expire_attachments)
