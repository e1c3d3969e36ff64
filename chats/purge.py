"""Permanent deletion of what no user can reach any more: deleted chats with their content, and unused uploads.

Ledger rows stay; reports show a purged chat without its title. Every step can be interrupted and repeated, also by
several processes at once. Files are deleted before the rows that refer to them, so a later purge finds the rest.
"""

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet

from chats import attachments, files
from chats.models import Attachment, AttachmentStatus, Chat, Message
from chats.services import chat_purged
from config.database import batches
from config.kernel import clock
from config.kernel.errors import Unavailable
from config.queue import jobs

logger = logging.getLogger(__name__)

CHATS_BATCH = 100
FILES_BATCH = 50


def purge_chats() -> int:
    """Purge the chats that were deleted more than CHAT_RETENTION_DAYS ago. Returns their number."""
    due = Chat.objects.filter(deleted_at__lt=_cutoff(settings.CHAT_RETENTION_DAYS))
    return sum(jobs.each("purge-chats", batches.in_order(due, "deleted_at", CHATS_BATCH), purge_chat))


def _cutoff(days: int) -> datetime:
    """The time before which something must have become unreachable to be purged. An object storage accepts uploads to
    an attachment until its upload address lapses, so until then a deleted file could come back.
    """
    lapsed = timedelta(seconds=attachments.ATTACHMENT_EXPIRY_SECONDS if files.takes_uploads() else 0)
    return clock.now() - max(timedelta(days=days), lapsed)


def purge_chat(chat_id: str) -> bool:
    """Returns False if a part of the chat is left for the next purge."""
    attached = Attachment.objects.filter(message__chat=chat_id).order_by("pk")
    try:
        while not batches.stopping.is_set() and attached.exists():
            _delete_with_files(attached)
        answers = [left for _, left in chat_purged.send(Chat, chat_id=chat_id)]
    except Unavailable:
        logger.warning("chat %s is not purged yet: its files were not removed", chat_id)
        return False
    messages = Message.objects.filter(chat=chat_id)
    batches.in_batches(lambda: batches.delete_batch(messages))
    if any(answers) or messages.exists():
        return False
    return bool(batches.delete_batch(Chat.objects.filter(pk=chat_id)))


def _delete_with_files(rows: QuerySet[Attachment]) -> int:
    """Delete a batch of attachments. Returns how many this process has deleted."""
    batch = list(rows.values_list("pk", flat=True)[:FILES_BATCH])
    for attachment_id in batch:
        files.remove_all(attachment_id)
    return batches.delete_rows(Attachment, "id", batch)


def purge_uploads(user_id: int) -> int:
    """Delete the user's attachments that no message uses. Returns their number. Raises Unavailable."""
    unused = Attachment.objects.filter(message=None, user=user_id).order_by("pk")
    return batches.in_batches(lambda: _delete_with_files(unused))


def purge_attachments() -> int:
    """Delete attachments that no message has used within ATTACHMENT_UNUSED_DAYS. Returns the number of deleted rows."""
    unused = Attachment.objects.filter(message=None, created_at__lt=_cutoff(settings.ATTACHMENT_UNUSED_DAYS))
    return sum(jobs.each("purge-attachments", batches.in_order(unused, "created_at", FILES_BATCH), _purge_unused))


def _purge_unused(attachment_id: str) -> int:
    attachments.expire_unused(attachment_id)  # no message can use it while its files are removed
    return _delete_with_files(Attachment.objects.filter(pk=attachment_id, status=AttachmentStatus.EXPIRED))
