"""Chats, their messages and attached files. Runs refer to chats by foreign key; chats refer to runs by plain id."""

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from config.database.protected import ProtectedModel
from config.kernel.choices import StatusChoices
from config.kernel.ids import IdField, RefField

CLIENT_ID_MAX_CHARS = 128


class Chat(models.Model):
    id = IdField(prefix="chat")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="chats", db_index=False)
    title = models.CharField(max_length=200, null=True)
    # The caller's own id of the chat.
    client_id = models.CharField(max_length=CLIENT_ID_MAX_CHARS, null=True)
    # The run that may execute now; queued runs wait behind it. Written by runs.lifecycle.
    active_run_id = RefField(null=True)
    # False if no run waits behind the active one.
    has_line = models.BooleanField(default=False)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["user", "client_id"],
                condition=Q(client_id__isnull=False, deleted_at=None),
                name="chat_one_live_per_client_id",
            )
        ]
        indexes = [
            models.Index("user", "created_at", "id", condition=Q(deleted_at=None), name="chat_live_by_user"),
            models.Index("deleted_at", "id", condition=Q(deleted_at__isnull=False), name="chat_to_purge"),
            models.Index("user", "id", name="chat_by_user"),
        ]

    def __str__(self) -> str:
        # Without the title, which comes from a message: this text is in logs and the admin.
        return self.id


class Message(models.Model):
    class Role(models.TextChoices):
        USER = "user"
        ASSISTANT = "assistant"

    id = IdField(prefix="msg")
    chat = models.ForeignKey(Chat, models.CASCADE, related_name="messages", db_index=False)
    run_id = RefField(db_index=True)
    role = models.CharField(max_length=10, choices=Role.choices)
    content = models.TextField(default="")
    # Whether its run was replaced by a later one.
    replaced = models.BooleanField(default=False)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["created_at", "id"]
        # With ``replaced``, so that a list without replaced messages need not read their rows.
        indexes = [models.Index("chat", "created_at", "id", "replaced", name="message_by_chat")]

    def __str__(self) -> str:
        return f"{self.role} message {self.id}"


class AttachmentStatus(StatusChoices):
    PENDING = "PENDING", "warning", False
    # Not final: a file that no message uses expires.
    READY = "READY", "success", False
    EXPIRED = "EXPIRED", "default", True


class Attachment(ProtectedModel):
    """A file for at most one message. ``file_name`` is for display; the storage has the file as ``stored_name``."""

    id = IdField(prefix="att")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="attachments")
    message = models.ForeignKey(Message, models.CASCADE, null=True, related_name="attachments", db_index=False)
    # The position among the message's attachments, from 0.
    position = models.PositiveSmallIntegerField(default=0)
    file_name = models.CharField(max_length=255)
    content_type = models.CharField(max_length=127)
    size_bytes = models.BigIntegerField()
    # The announced digest; for a ready attachment, the computed one.
    sha256 = models.CharField(max_length=64, null=True)
    status = models.CharField(max_length=8, choices=AttachmentStatus.choices, default=AttachmentStatus.PENDING)
    stored_name = models.CharField(max_length=100, default="")
    # The original attachment with the same file, which belongs to a replaced message of the chat.
    copy_of = RefField(null=True)
    # Pending: when it expires. Expired: when the removal of its files is (again) due. Otherwise null.
    expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index("message", "position", condition=Q(message__isnull=False), name="attachment_by_message"),
            models.Index("expires_at", condition=Q(expires_at__isnull=False), name="attachment_due"),
            models.Index("created_at", condition=Q(message__isnull=True), name="attachment_unused"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(message=None) | Q(status=AttachmentStatus.READY), name="attachment_used_is_ready"
            )
        ]

    def __str__(self) -> str:
        return self.id
