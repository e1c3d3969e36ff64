"""Operations on attachments, and the only writer of their status, by guarded UPDATEs."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.files.base import File
from django.core.files.storage import default_storage
from django.core.signing import BadSignature, Signer
from django.db import transaction
from django.db.models import Q, QuerySet, Sum
from django.urls import reverse

from chats import files
from chats.models import Attachment, AttachmentStatus
from config.database import batches
from config.database.protected import take_key
from config.kernel import clock
from config.kernel.errors import Conflict, NotFound, PayloadTooLarge, RateLimited, Unavailable, ValidationFailed
from config.kernel.ids import is_plausible_id, new_id
from config.limits.share import Share
from config.queue import jobs

logger = logging.getLogger(__name__)

# Time in which an attachment must be uploaded and completed.
ATTACHMENT_EXPIRY_SECONDS = 24 * 3600
ATTACHMENTS_PER_MESSAGE_MAX = 10
# The most uploads and downloads of one user that a web process handles at the same time; one more gets 429.
ATTACHMENT_TRANSFERS_PER_USER = 10
SWEEP_BATCH = 200
FILES_BATCH = 50
# The delay before a failed removal of files is repeated.
REMOVE_AGAIN = timedelta(hours=1)
_KEY = take_key(Attachment)
_signer = Signer(salt="chats.attachments.upload")
_transfers = Share(ATTACHMENT_TRANSFERS_PER_USER)


@contextlib.contextmanager
def transfer(user_id: int) -> Iterator[None]:
    """The context of an upload or download of the user. Raises RateLimited if the user has too many."""
    if not _transfers.take_now(user_id):
        message = "Too many of your files are uploaded or downloaded at the same time; try again later."
        raise RateLimited(message, headers={"Retry-After": "1"})
    try:
        yield
    finally:
        _transfers.give_back(user_id)


def attachments_of(user: Any) -> QuerySet[Attachment]:
    """The user's attachments, except those in deleted chats."""
    return Attachment.objects.filter(Q(message=None) | Q(message__chat__deleted_at=None), user=user)


def create_attachment(user: Any, *, size_bytes: int, **about: Any) -> Attachment:
    """``about``: ``file_name``, ``content_type`` and possibly ``sha256``. Raises PayloadTooLarge, and Conflict if all
    attachments of the user would exceed ATTACHMENT_USER_MAX_BYTES.
    """
    if size_bytes > settings.ATTACHMENT_MAX_BYTES:
        raise PayloadTooLarge(f"A file may have at most {settings.ATTACHMENT_MAX_BYTES} bytes.")
    with transaction.atomic():
        if most := settings.ATTACHMENT_USER_MAX_BYTES:
            # Without the lock, two concurrent requests would each miss the other's bytes.
            get_user_model()._default_manager.select_for_update(no_key=True).get(pk=user.pk)
            # An expired attachment without ``expires_at`` has no files any more, and a copy has no files of its own.
            without_files = Q(copy_of__isnull=False) | Q(status=AttachmentStatus.EXPIRED, expires_at=None)
            kept = Attachment.objects.filter(~without_files, user=user)
            total = kept.aggregate(total=Sum("size_bytes", default=0))["total"]
            if total + size_bytes > most:
                has = f"Your attachments have {total} of at most {most} bytes"
                raise Conflict(f"{has}; those of deleted chats count until the purge.")
        now = clock.now()
        about |= {"created_at": now, "expires_at": now + timedelta(seconds=ATTACHMENT_EXPIRY_SECONDS)}
        return Attachment.objects.create(user=user, size_bytes=size_bytes, **about)


def upload_of(attachment: Attachment, surface: str) -> dict[str, Any]:
    """Where and how the file of a pending attachment is uploaded, as ``{url, method, headers, expires_at}``."""
    if files.takes_uploads():
        # Not valid for longer than the attachment: nobody would find and remove the file of a later upload.
        left = (attachment.expires_at - clock.now()).total_seconds() if attachment.expires_at else 0
        what = {"content_type": attachment.content_type, "size": attachment.size_bytes, "sha256": attachment.sha256}
        storage: Any = default_storage
        with files.storage_errors():
            url, headers = storage.presign_put(files.direct_name(attachment.pk), **what, seconds=max(1, int(left)))
    else:
        path = reverse("upload", args=[_signer.sign(f"{surface}.{attachment.pk}")])
        url, headers = f"{settings.BASE_URL}{path}", {"Content-Type": attachment.content_type}
    return {"url": url, "method": "PUT", "headers": headers, "expires_at": attachment.expires_at}


def attachment_to_upload(token: str) -> tuple[str, Attachment]:
    """The surface and the attachment of an upload URL. Raises NotFound if the token is not valid."""
    try:
        surface, _, attachment_id = _signer.unsign(token).partition(".")
        return surface, Attachment.objects.select_related("user").get(pk=attachment_id, user__is_active=True)
    except (BadSignature, Attachment.DoesNotExist):
        raise NotFound from None


def refuse_unless_pending(attachment: Attachment) -> None:
    """Raises Conflict if the attachment is complete, NotFound if it has expired."""
    if attachment.status == AttachmentStatus.READY:
        raise Conflict("The attachment is complete; its file can't be changed any more.")
    expired = attachment.status == AttachmentStatus.EXPIRED
    if expired or attachment.expires_at is None or attachment.expires_at <= clock.now():
        raise NotFound


def receive(attachment: Attachment, stream: Any) -> None:
    """Store what is read from ``stream``, in place of an earlier upload. Raises NotFound, Conflict, Unavailable."""
    try:
        name = files.write(attachment.pk, File(stream), attachment.content_type)
    except FileNotFoundError:
        attachment.refresh_from_db()
        refuse_unless_pending(attachment)
        raise Unavailable from None
    row = Attachment.objects.filter(pk=attachment.pk)
    try:
        with transaction.atomic():
            locked = row.select_for_update(no_key=True).first()
            if locked is None:
                raise NotFound
            refuse_unless_pending(locked)
            row.update(stored_name=name)
    except BaseException:
        files.remove(name)
        raise
    if locked.stored_name:
        files.remove(locked.stored_name)


def complete_attachment(attachment: Attachment) -> Attachment:
    """Check the uploaded file and make the attachment ready. Raises Conflict, ValidationFailed, Unavailable."""
    if attachment.status == AttachmentStatus.READY:
        return attachment
    _expire_due([attachment.pk])
    attachment.refresh_from_db()
    if attachment.status == AttachmentStatus.EXPIRED:
        raise Conflict("The attachment was not completed in time; make a new one.")
    uploaded = attachment.stored_name
    try:
        stored, sha256 = _check(attachment, uploaded or files.direct_name(attachment.pk))
    except FileNotFoundError:
        # Another upload has replaced the file during the check, or there was no file.
        raise Conflict("The file was not uploaded yet.") from None
    # The condition on ``stored_name`` fails if a newer upload has replaced the file.
    pending = Attachment.objects.filter(
        pk=attachment.pk, status=AttachmentStatus.PENDING, expires_at__gt=clock.now(), stored_name=uploaded
    )
    completed = pending.change(_KEY, status=AttachmentStatus.READY, stored_name=stored, sha256=sha256, expires_at=None)
    attachment.refresh_from_db()
    if not completed and stored != uploaded:
        files.remove(stored)
    if attachment.status != AttachmentStatus.READY:
        raise Conflict("The file was uploaded again meanwhile; complete the attachment again.")
    try:
        files.remove_all(attachment.pk, but=attachment.stored_name)
    except Unavailable:
        logger.warning("attachment %s is ready, but files of earlier uploads were not removed", attachment.pk)
    return attachment


def _check(attachment: Attachment, name: str) -> tuple[str, str]:
    """The checked file's name and digest. A file that its uploader could still overwrite is copied first."""
    with files.storage_errors(), default_storage.open(name) as file:
        size, sha256, problem = files.inspect(file.chunks(files.READ_SIZE), attachment.content_type)
        if size != attachment.size_bytes:
            raise ValidationFailed({"sizeBytes": [f"The file has {size} bytes, not {attachment.size_bytes}."]})
        if attachment.sha256 not in (None, sha256):
            raise ValidationFailed({"sha256": [f"The file's SHA-256 is {sha256}."]})
        if problem is not None:
            raise ValidationFailed({"contentType": [problem]})
        if name == attachment.stored_name:
            return name, sha256
        file.seek(0)
        return files.write(attachment.pk, File(file), attachment.content_type), sha256


def lock_usable(user: Any, attachment_ids: Sequence[str], replaced_id: str | None = None) -> list[Attachment]:
    """The given attachments in the given order, if a new message may use them, locked until the transaction ends.
    Usable are unused attachments, and attachments with a file of the replaced message, for which a client may know the
    id of the original. Raises ValidationFailed, which names each unusable one as ``attachmentIds.<i>``.
    """
    if not attachment_ids:
        return []
    asked = [key for key in attachment_ids if is_plausible_id(key)]
    # In the order of ids, so that two messages with the same attachments do not deadlock.
    found = Attachment.objects.select_for_update(no_key=True).filter(user=user, pk__in=asked).order_by("pk").in_bulk()
    replaced = {_original(each) for each in Attachment.objects.filter(message=replaced_id)} if replaced_id else set()
    problems = {
        f"attachmentIds.{index}": [problem]
        for index, key in enumerate(attachment_ids)
        if (problem := _why_unusable(found.get(key), replaced, key in attachment_ids[:index]))
    }
    if problems:
        raise ValidationFailed(problems)
    return [found[key] for key in attachment_ids]


def _original(attachment: Attachment) -> str:
    return attachment.copy_of or attachment.pk


def _why_unusable(attachment: Attachment | None, replaced: set[str], named_before: bool) -> str | None:
    if attachment is None:
        return "There is no such attachment."
    if named_before:
        return "The attachment is named twice."
    if attachment.status == AttachmentStatus.EXPIRED:
        return "The attachment has expired."
    if attachment.status != AttachmentStatus.READY:
        return "The attachment is not complete."
    usable = attachment.message_id is None or _original(attachment) in replaced
    return None if usable else "The attachment was used already."


def use(attachments: Sequence[Attachment], message_id: str) -> None:
    """Attach the result of ``lock_usable`` in this order. A replaced message keeps its own: they are copied."""
    copies = [attachment for attachment in attachments if attachment.message_id is not None]
    unused = [attachment for attachment in attachments if attachment.message_id is None]
    for copy in copies:
        copy.copy_of, copy.pk = _original(copy), new_id("att")
    for position, attachment in enumerate(attachments):
        attachment.message_id, attachment.position = message_id, position
    Attachment.objects.bulk_update(unused, ["message_id", "position"])
    Attachment.objects.bulk_create(copies)


def attached_to(message_ids: Sequence[str]) -> dict[str, list[Attachment]]:
    """By message id, the attachments of each message that has any, in order. No query if there are no messages."""
    attached: dict[str, list[Attachment]] = {}
    for attachment in Attachment.objects.filter(message__in=message_ids).order_by("position"):
        attached.setdefault(str(attachment.message_id), []).append(attachment)
    return attached


def expire_attachments() -> int:
    """Expire attachments that were not completed in time. A row is due until its files are removed."""
    due = Attachment.objects.filter(expires_at__lte=clock.now())
    return sum(jobs.each("expire-attachments", batches.in_order(due, "expires_at", SWEEP_BATCH), _expire))


def _expire(attachment_id: str) -> int:
    row = Attachment.objects.filter(pk=attachment_id)
    with transaction.atomic():
        _expire_due(batches.take_batch(row))
    # Another process may have completed it in time.
    expired = row.filter(status=AttachmentStatus.EXPIRED, expires_at__isnull=False)
    if not expired.exists():
        return 0
    try:
        files.remove_all(attachment_id)
    except Unavailable:
        expired.update(expires_at=clock.now() + REMOVE_AGAIN)
        return 0
    return expired.update(expires_at=None, stored_name="")


def _expire_due(attachment_ids: Sequence[str]) -> None:
    """PENDING → EXPIRED. ``expires_at`` stays until their files are removed."""
    due = Attachment.objects.filter(pk__in=attachment_ids, status=AttachmentStatus.PENDING, expires_at__lte=clock.now())
    due.change(_KEY, status=AttachmentStatus.EXPIRED)


def cutoff(days: int) -> datetime:
    """The time before which something must have become unreachable to be purged. An object storage accepts uploads to
    an attachment until its upload address lapses, so until then a deleted file could come back.
    """
    lapsed = timedelta(seconds=ATTACHMENT_EXPIRY_SECONDS if files.takes_uploads() else 0)
    return clock.now() - max(timedelta(days=days), lapsed)


def purge_attachments() -> int:
    """Delete attachments that no message has used within ATTACHMENT_UNUSED_DAYS. Returns the number of deleted rows."""
    unused = Attachment.objects.filter(message=None, created_at__lt=cutoff(settings.ATTACHMENT_UNUSED_DAYS))
    return sum(jobs.each("purge-attachments", batches.in_order(unused, "created_at", FILES_BATCH), _purge_unused))


def _purge_unused(attachment_id: str) -> int:
    row = Attachment.objects.filter(pk=attachment_id)
    # READY → EXPIRED: no message can use it while its files are removed.
    unused = row.filter(status=AttachmentStatus.READY, message=None)
    unused.change(_KEY, status=AttachmentStatus.EXPIRED, expires_at=clock.now())
    return delete_with_files(row.filter(status=AttachmentStatus.EXPIRED))


def purge_uploads(user_id: int) -> int:
    """Delete the user's attachments that no message uses. Returns their number. Raises Unavailable."""
    unused = Attachment.objects.filter(message=None, user=user_id).order_by("pk")
    return batches.in_batches(lambda: delete_with_files(unused))


def delete_with_files(rows: QuerySet[Attachment]) -> int:
    """Delete a batch of attachments. Returns how many this process has deleted. Files are deleted before the rows that
    refer to them, so that after a failure a later call finds the rest. Raises Unavailable.
    """
    batch = list(rows.values_list("pk", flat=True)[:FILES_BATCH])
    for attachment_id in batch:
        files.remove_all(attachment_id)
    return batches.delete_rows(Attachment, "id", batch)
