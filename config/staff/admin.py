"""The admin of roles (groups of permissions) and of the log of staff's actions."""

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import GroupAdmin as PlainGroupAdmin
from django.contrib.auth.models import Group

from config.staff.base import ReadOnly, StaffAdmin, column, user_column

admin.site.unregister(Group)


@admin.register(Group)
class GroupAdmin(StaffAdmin, PlainGroupAdmin):  # type: ignore[misc]
    ordering = ("name",)
    search_fields = ()


@admin.register(LogEntry)
class LogEntryAdmin(ReadOnly, StaffAdmin):
    empty_text = "Every action of staff appears here."
    list_display = ("action_time", user_column(), "content_type", "object_repr", "message")
    list_select_related = ("user", "content_type")
    fields = ("action_time", "user", "content_type", "object_id", "object_repr", "message")
    search_help_text = "User"
    message = column("change", LogEntry.get_change_message)
