"""Celery tasks of chats and attachments. A lost message loses nothing: the next task finds what is due."""

from celery import shared_task

from chats import attachments, purge
from config.queue import jobs


@shared_task(name="chats.purge", ignore_result=True)
def purge_chats() -> None:
    jobs.run("purge-chats", purge.purge_chats)


@shared_task(name="chats.purge_attachments", ignore_result=True)
def purge_attachments() -> None:
    jobs.run("purge-attachments", purge.purge_attachments)


@shared_task(name="chats.expire_attachments", ignore_result=True)
def expire_attachments() -> None:
    jobs.run("expire-attachments", attachments.expire_attachments)
