"""What staff see of runs: all of it to read; of the catalogue, what they offer."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest

from runs import catalogue, transitions
from runs.models import AgentModel, Run, Tool, ToolInvocation, Turn, Waitpoint
from runs.tools.base import ToolFailure, parse_headers
from runs.tools.schema import check_schema


class ReadOnly:
    """Rows that the service writes and nobody edits."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class TurnInline(ReadOnly, admin.TabularInline):
    model = Turn
    fields = ["index", "model", "input_tokens", "output_tokens", "started_at", "finished_at"]
    extra = 0


class ToolInvocationInline(ReadOnly, admin.TabularInline):
    model = ToolInvocation
    fields = ["turn_index", "call_index", "name", "status", "error_code", "started_at", "finished_at"]
    extra = 0


class WaitpointInline(ReadOnly, admin.TabularInline):
    model = Waitpoint
    fields = ["kind", "status", "created_at", "expires_at", "resolved_at"]
    extra = 0


@admin.register(Run)
class RunAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["id", "user_id", "chat_id", "status", "error_code", "resolved_model", "created_at", "finished_at"]
    list_filter = ["status", "error_code"]
    search_fields = ["id__exact", "chat__id__exact", "user__username__exact"]
    show_full_result_count = False
    inlines = [TurnInline, ToolInvocationInline, WaitpointInline]
    actions = ["cancel_runs"]

    @admin.action(description="Cancel the selected runs", permissions=["cancel"])
    def cancel_runs(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        for run in queryset:
            transitions.cancel(run.pk)
            self.log_change(request, run, "Cancelled.")
        self.message_user(request, "The runs were cancelled; a running one ends within a second.", messages.SUCCESS)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("runs.change_run"))


@admin.register(AgentModel)
class AgentModelAdmin(admin.ModelAdmin):
    list_display = ["name", "provider", "provider_model", "is_default", "enabled"]

    def save_model(self, request: HttpRequest, obj: AgentModel, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        catalogue.forget()


class ToolForm(forms.ModelForm):
    """``secret_headers`` can be set and never seen: left empty, what is stored stays."""

    secret_headers = forms.CharField(
        required=False,
        widget=forms.PasswordInput,
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty keeps what is stored.',
    )
    timeout_seconds = forms.FloatField(required=False, min_value=0.1, max_value=3600)

    class Meta:
        model = Tool
        fields = [
            "name",
            "display_name",
            "description",
            "node_type",
            "input_schema",
            "price",
            "approval",
            "timeout_seconds",
            "repeatable",
            "url",
            "remote_name",
            "secret_headers",
            "enabled",
        ]

    def clean_secret_headers(self) -> str | None:
        text = self.cleaned_data["secret_headers"]
        if not text:
            return self.instance.secret_headers if self.instance.pk else None
        try:
            parse_headers(text)
        except ValueError as error:
            raise ValidationError(str(error)) from None
        return str(text)

    def clean_input_schema(self) -> Any:
        schema = self.cleaned_data["input_schema"] or {}
        try:
            check_schema(schema)
        except (ToolFailure, ValueError) as error:
            raise ValidationError(getattr(error, "message", str(error))) from None
        return schema


@admin.register(Tool)
class ToolAdmin(admin.ModelAdmin):
    form = ToolForm
    list_display = ["name", "node_type", "price", "approval", "repeatable", "enabled"]

    def save_model(self, request: HttpRequest, obj: Tool, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        catalogue.forget()
