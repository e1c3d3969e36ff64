"""The admin of chats and attachments, read-only. It shows no title, message, file or file name: they are private."""

from django.contrib import admin

from chats.models import Attachment, AttachmentStatus, Chat
from config.staff.base import ReadOnly, StaffAdmin, link_column, list_column, status_column, user_column

USER, RUN = user_column(), link_column("active_run_id", "active run")
RUNS = list_column("runs", "Runs of this chat", "runs_run?q")


@admin.register(Chat)
class ChatAdmin(ReadOnly, StaffAdmin):
    empty_text = "Users create chats with the API or in the playground."
    list_display = ("id", USER, RUN, "created_at", "updated_at", "deleted_at")
    fields = ("id", "user", RUN, RUNS, "created_at", "updated_at", "deleted_at")
    list_select_related = ("user",)
    search_help_text = "Chat's id or user"


@admin.register(Attachment)
class AttachmentAdmin(ReadOnly, StaffAdmin):
    list_display = ("id", USER, "content_type", "size_bytes", "state", "created_at")
    fields = ("id", "user", "content_type", "size_bytes", "sha256", "status", "message_id", "created_at", "expires_at")
    list_filter = ("status",)
    list_select_related = ("user",)
    search_help_text = "Attachment's id or user"
    state = status_column(AttachmentStatus)
