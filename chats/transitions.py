"""Every transition of an attachment: the only writer of its status, by guarded UPDATEs."""

from __future__ import annotations

from collections.abc import Sequence

from chats.models import Attachment, AttachmentStatus
from config.database.protected import take_key
from config.kernel import clock

_KEY = take_key(Attachment)


def complete(attachment: Attachment, *, uploaded: str, stored: str, sha256: str) -> bool:
    """PENDING → READY, with the checked file. False if it is no longer pending, or if a newer upload has replaced
    ``uploaded``.
    """
    pending = Attachment.objects.filter(
        pk=attachment.pk, status=AttachmentStatus.PENDING, expires_at__gt=clock.now(), stored_name=uploaded
    )
    return bool(pending.change(_KEY, status=AttachmentStatus.READY, stored_name=stored, sha256=sha256, expires_at=None))


def expire(attachment_ids: Sequence[str]) -> int:
    """PENDING → EXPIRED, for those that are due. ``expires_at`` stays until their files are removed."""
    due = Attachment.objects.filter(pk__in=attachment_ids, status=AttachmentStatus.PENDING, expires_at__lte=clock.now())
    return due.change(_KEY, status=AttachmentStatus.EXPIRED)


def expire_unused(attachment_ids: Sequence[str]) -> int:
    """READY → EXPIRED, for those that no message uses. They are due at once, so their files are removed next."""
    unused = Attachment.objects.filter(pk__in=attachment_ids, status=AttachmentStatus.READY, message=None)
    return unused.change(_KEY, status=AttachmentStatus.EXPIRED, expires_at=clock.now())
