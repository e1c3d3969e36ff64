"""Staff see every key, can narrow its scopes and revoke it. Nobody can make one here: its secret would be another's."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from apikeys import keys
from apikeys.models import ApiKey


class ApiKeyForm(forms.ModelForm):
    """A key's scopes can be taken away or given back, up to the default ones."""

    scopes = forms.MultipleChoiceField(
        choices=[(scope, scope) for scope in keys.DEFAULT_SCOPES],
        widget=forms.CheckboxSelectMultiple,
        required=False,
    )

    class Meta:
        model = ApiKey
        fields = ["scopes"]


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin):
    form = ApiKeyForm
    list_display = ["id", "prefix", "name", "user", "created_at", "last_used_at", "expires_at", "revoked_at"]
    list_select_related = ["user"]
    search_fields = ["id", "prefix", "user__username"]
    show_full_result_count = False
    readonly_fields = ["id", "user", "name", "prefix", "created_at", "last_used_at", "expires_at", "revoked_at"]
    fields = [*readonly_fields, "scopes"]
    actions = ["revoke"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        revoked = [key for key in queryset if key.revoked_at is None]
        for key in revoked:
            keys.revoke_key(key)
            self.log_change(request, key, "Revoked.")
        self.message_user(request, f"{len(revoked)} revoked; effective at once.", messages.SUCCESS)
