"""Accounts and the ledger to look at. Credits move through ``ledger.py`` alone, so nothing can be changed here."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from config.api import money
from credits.models import Account, LedgerEntry


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


def credits_column(name: str) -> Any:
    @admin.display(description=f"{name} (credits)", ordering=None if name == "available" else name)
    def column(self: Any, row: Any) -> str:
        return money.to_text(getattr(row, name))

    return column


@admin.register(Account)
class AccountAdmin(ReadOnlyAdmin):
    balance_credits = credits_column("balance")
    held_credits = credits_column("held")
    available_credits = credits_column("available")
    list_display = ["user", "balance_credits", "held_credits", "available_credits", "updated_at"]
    fields = ["user", "balance_credits", "held_credits", "available_credits", "created_at", "updated_at"]
    search_fields = ["user__username", "user__email"]
    list_select_related = ["user"]


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnlyAdmin):
    amount_credits = credits_column("amount")
    list_display = ["id", "account", "type", "amount_credits", "tool_key", "run_id", "reason", "created_at"]
    fields = [
        "id",
        "account",
        "type",
        "amount_credits",
        "tool_key",
        "chat_id",
        "run_id",
        "invocation_id",
        "against",
        "cause",
        "price",
        "reason",
        "staff",
        "expires_at",
        "created_at",
    ]
    list_filter = ["type"]
    search_fields = ["id", "run_id", "invocation_id", "chat_id", "account__user__username"]
    list_select_related = ["account__user"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[LedgerEntry]:
        return super().get_queryset(request).select_related("account__user", "staff")
