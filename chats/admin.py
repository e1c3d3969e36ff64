"""Chats and attachments to look at; messages and files are their users' own, and are not shown here."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from chats.models import Attachment, Chat


class ReadOnlyAdmin(admin.ModelAdmin):
    # Counting millions of rows for a page's header would cost more than the page.
    show_full_result_count = False
    list_per_page = 50
    actions = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Chat)
class ChatAdmin(ReadOnlyAdmin):
    list_display = ["id", "user", "title", "active_run_id", "created_at", "deleted_at"]
    search_fields = ["id", "user__username"]
    list_select_related = ["user"]


@admin.register(Attachment)
class AttachmentAdmin(ReadOnlyAdmin):
    list_display = ["id", "user", "file_name", "content_type", "size_bytes", "status", "created_at"]
    fields = [
        "id",
        "user",
        "file_name",
        "content_type",
        "size_bytes",
        "sha256",
        "status",
        "message_id",
        "stored_name",
        "created_at",
        "expires_at",
    ]
    list_filter = ["status"]
    search_fields = ["id", "user__username"]
    list_select_related = ["user"]
