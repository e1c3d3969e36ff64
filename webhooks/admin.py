"""Staff's view of webhooks: all of it read-only but for switching an endpoint off. No secret is ever part of a page."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from webhooks import services
from webhooks.models import Attempt, Delivery, Endpoint

SECRET_FIELDS = ("secret", "secondary_secret")


class ReadOnly:
    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Endpoint)
class EndpointAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["id", "user", "receiver", "enabled", "failing", "created_at", "deleted_at"]
    list_filter = ["enabled", "failing"]
    list_select_related = ["user"]
    search_fields = ["id__exact", "user__username__exact"]
    search_help_text = "An endpoint's id, or a user's name"
    exclude = [*SECRET_FIELDS, "url"]
    readonly_fields = ["receiver"]
    actions = ["disable_endpoint"]
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Endpoint]:
        return super().get_queryset(request).defer(*SECRET_FIELDS)

    @admin.display(description="receiver")
    def receiver(self, endpoint: Endpoint) -> str:
        """Not the path and query: with many receivers they are the credential."""
        parts = urlsplit(endpoint.url)
        return f"{parts.scheme}://{parts.netloc}"

    def has_disable_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("webhooks.change_endpoint")

    @admin.action(description="Disable endpoint", permissions=["disable"])
    def disable_endpoint(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> None:
        chosen = list(queryset.filter(deleted_at=None, enabled=True))
        count = services.disable(queryset)
        for endpoint in chosen:
            self.log_change(request, endpoint, "Disabled.")
        self.message_user(request, f"{count} disabled; what was pending for them is dropped.", messages.SUCCESS)


class AttemptInline(ReadOnly, admin.TabularInline):
    model = Attempt
    extra = 0
    fields = ["number", "started_at", "duration_ms", "status_code", "error", "answer"]
    ordering = ["number"]


@admin.register(Delivery)
class DeliveryAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["id", "event_type", "user", "run_id", "status", "attempt_count", "next_attempt_at", "created_at"]
    list_filter = ["status", "event_type"]
    list_select_related = ["user"]
    search_fields = ["id__exact", "event_id__exact", "run_id__exact", "user__username__exact"]
    search_help_text = "The id of a delivery, event or run, or a user's name"
    inlines = [AttemptInline]
    show_full_result_count = False
    fields = [
        "id",
        "event_id",
        "event_type",
        "user",
        "endpoint_id",
        "run_id",
        "chat_id",
        "body",
        "status",
        "attempt_count",
        "next_attempt_at",
        "created_at",
        "finished_at",
    ]
    readonly_fields = ["endpoint_id"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Delivery]:
        return super().get_queryset(request).select_related("user")


@admin.register(Attempt)
class AttemptAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["delivery_id", "number", "started_at", "duration_ms", "status_code", "error"]
    list_filter = ["number"]
    search_fields = ["delivery__id__exact"]
    search_help_text = "A delivery's id"
    show_full_result_count = False
    fields = ["delivery_id", "number", "started_at", "duration_ms", "status_code", "error", "answer"]
    readonly_fields = ["delivery_id"]
