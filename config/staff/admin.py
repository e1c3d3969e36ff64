"""The admin of users, roles (groups of permissions) and the log of staff's actions."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import GroupAdmin as PlainGroupAdmin
from django.contrib.auth.admin import UserAdmin as PlainUserAdmin
from django.contrib.auth.models import Group, User
from django.db.models import Q
from django.urls import reverse
from django.utils.html import format_html
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from config.staff.base import ReadOnly, StaffAdmin, users_named

admin.site.unregister([User, Group])


@admin.register(User)
class UserAdmin(StaffAdmin, PlainUserAdmin):
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    # Unfold's empty value would come first.
    add_fieldsets = PlainUserAdmin.add_fieldsets
    ordering = ("-pk",)
    search_fields = ("pk",)
    search_help_text = "A user's name, e-mail address or id"
    list_display = ("username", "email", "is_staff", "is_active", "date_joined", "last_login", "theirs")
    list_filter = ("is_staff", "is_superuser", "is_active")

    def find(self, word: str) -> Q:
        return Q(pk__in=users_named(word))

    @admin.display(description="page")
    def theirs(self, user: User) -> str:
        return format_html('<a href="{}">Page of {}</a>', reverse("person", args=[user.pk]), user.get_username())


@admin.register(Group)
class GroupAdmin(PlainGroupAdmin, ModelAdmin):
    pass


@admin.register(LogEntry)
class LogEntryAdmin(ReadOnly, StaffAdmin):
    """The log of staff's actions."""

    empty_text = "Every action of staff appears here."
    list_display = ("action_time", "user", "content_type", "object_repr", "message")
    list_select_related = ("user", "content_type")
    fields = ("action_time", "user", "content_type", "object_id", "object_repr", "message")
    readonly_fields = ("message",)
    search_help_text = "User"

    @admin.display(description="change")
    def message(self, entry: LogEntry) -> str:
        return entry.get_change_message()
