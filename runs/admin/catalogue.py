"""The catalogue: what models and tools runs are offered. Prices are in credits here; secrets go in and never out."""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminPasswordWidget

from config.kernel import money
from config.staff.base import StaffAdmin
from config.staff.forms import CreditsField, ObjectField
from runs import catalogue
from runs.models import AgentModel, Tool
from runs.tools import builtin
from runs.tools.base import ASK_USER, ToolFailure, parse_headers
from runs.tools.schema import check_schema

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
BUILTIN = {*builtin.TOOLS, ASK_USER}


class CatalogueAdmin(StaffAdmin):
    """Few rows, changed rarely; each process reads them anew within seconds."""

    ordering = ("name",)
    search_fields = ()
    list_disable_select_all = False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        catalogue.forget()

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        super().delete_model(request, obj)
        catalogue.forget()

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        super().delete_queryset(request, queryset)
        catalogue.forget()


class AgentModelForm(forms.ModelForm):
    price_in = CreditsField(label="Price of 1,000 tokens in", help_text="Credits")
    price_out = CreditsField(label="Price of 1,000 tokens out", help_text="Credits")

    class Meta:
        model = AgentModel
        fields = [
            "name",
            "display_name",
            "provider",
            "provider_model",
            "price_in",
            "price_out",
            "is_default",
            "enabled",
        ]
        help_texts = {"is_default": "For runs that name no model. The present default gives way."}

    def _get_validation_exclusions(self) -> set[str]:
        # Else a new default would be refused for the old one's sake, which gives way.
        return {*super()._get_validation_exclusions(), "is_default"}  # type: ignore[misc]


@admin.register(AgentModel)
class AgentModelAdmin(CatalogueAdmin):
    form = AgentModelForm

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        if obj.is_default:
            AgentModel.objects.filter(is_default=True).exclude(pk=obj.pk).update(is_default=False)
        super().save_model(request, obj, form, change)

    list_display = ("name", "provider", "provider_model", "prices", "is_default", "enabled")

    @admin.display(description="credits per 1,000 tokens in / out")
    def prices(self, model: AgentModel) -> str:
        return f"{money.to_text(model.price_in)} / {money.to_text(model.price_out)}"


class ToolForm(forms.ModelForm):
    """Secret headers can be set and never seen: what is stored is not even read, for no key may open it any more."""

    price = CreditsField(label="Price of a call", help_text="Credits: the estimate, and the most that a call can cost")
    input_schema = ObjectField(required=False, initial=dict, help_text="The JSON schema of the call's input, an object")
    new_secret_headers = forms.CharField(
        required=False,
        label="Secret headers",
        max_length=10_000,
        widget=UnfoldAdminPasswordWidget,
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty keeps what is stored.',
    )
    forget_secret_headers = forms.BooleanField(required=False, label="Forget the stored secret headers")
    timeout_seconds = forms.FloatField(
        required=False, min_value=0.1, max_value=3600, widget=UnfoldAdminDecimalFieldWidget
    )

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
            "enabled",
        ]

    def clean_timeout_seconds(self) -> float | None:
        seconds = self.cleaned_data["timeout_seconds"]
        if seconds is not None and not math.isfinite(seconds):
            raise ValidationError("Enter a number.")
        return seconds

    def clean_name(self) -> str:
        if not NAME.fullmatch(self.cleaned_data["name"]):
            raise ValidationError("Letters, digits, _ and - only: models know tools by such names.")
        return str(self.cleaned_data["name"])

    def clean_new_secret_headers(self) -> str:
        try:
            parse_headers(self.cleaned_data["new_secret_headers"])
        except ValueError as error:
            raise ValidationError(str(error)) from None
        return str(self.cleaned_data["new_secret_headers"])

    def clean_input_schema(self) -> Any:
        schema = self.cleaned_data["input_schema"] or {}
        try:
            check_schema(schema)
        except (ToolFailure, ValueError) as error:
            raise ValidationError(getattr(error, "message", str(error))) from None
        return schema

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if data.get("node_type") in (Tool.NodeType.HTTP, Tool.NodeType.MCP) and not is_address(data.get("url", "")):
            self.add_error("url", "An http or mcp tool needs an http(s) address, without credentials in it.")
        if data.get("node_type") == Tool.NodeType.BUILTIN and data.get("name") not in BUILTIN:
            self.add_error("node_type", f"Of this type are {', '.join(sorted(BUILTIN))} only.")
        if data.get("forget_secret_headers"):
            self.instance.secret_headers = None
        elif data.get("new_secret_headers"):
            self.instance.secret_headers = data["new_secret_headers"]
        return data


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False


@admin.register(Tool)
class ToolAdmin(CatalogueAdmin):
    form = ToolForm
    list_display = ("name", "node_type", "credits", "approval", "repeatable", "secret", "enabled")
    # Whoever may only look is shown these, and the stored headers in no form.
    view_fields = tuple(name for name in ToolForm.Meta.fields if name != "price")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tool]:
        return super().get_queryset(request).defer("secret_headers")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is not None and not self.has_change_permission(request, obj):
            return (*self.view_fields, "credits", "secret")
        return super().get_fields(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return ("credits", "secret") if obj is not None and not self.has_change_permission(request, obj) else ()

    @admin.display(description="price (credits)")
    def credits(self, tool: Tool) -> str:
        return money.to_text(tool.price)

    @admin.display(description="secret headers")
    def secret(self, tool: Tool) -> str:
        return "set" if Tool.objects.filter(pk=tool.pk, secret_headers__isnull=False).exists() else "–"
