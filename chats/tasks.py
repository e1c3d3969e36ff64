"""Celery's side of attachments. Losing a message loses nothing: the next one finds what is due."""

from celery import shared_task

from chats import attachments


@shared_task(name="chats.expire_attachments", ignore_result=True)
def expire_attachments() -> int:
    return attachments.expire_attachments()
