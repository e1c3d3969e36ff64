"""The catalogue: the models and tools that runs may use. Prices are in credits; secrets are never shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.db.models.signals import post_delete, post_save
from django.dispatch import receiver
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminPasswordWidget, UnfoldAdminSelectWidget

from config.kernel import money
from config.kernel.jsontext import to_text
from config.staff.base import StaffAdmin
from config.staff.forms import CreditsField, ObjectField
from runs import catalogue
from runs.llm.registry import PROVIDERS
from runs.models import AgentModel, Tool
from runs.tools import builtin
from runs.tools.base import BUILTIN, is_web_address, parse_headers
from runs.tools.dispatch import TYPES
from runs.tools.schema import check_schema

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class CatalogueAdmin(StaffAdmin):
    """Few rows that change rarely. Each process reads a change within seconds."""

    ordering = ("name",)
    search_fields = ()
    list_disable_select_all = False


@receiver((post_save, post_delete), sender=AgentModel)
@receiver((post_save, post_delete), sender=Tool)
def forget_catalogue(sender: Any, **kwargs: Any) -> None:
    catalogue.forget()


class AgentModelForm(forms.ModelForm):
    provider = forms.ChoiceField(
        choices=[(name, provider.label) for name, provider in PROVIDERS.items()], widget=UnfoldAdminSelectWidget
    )
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
        help_texts = {"is_default": "The model of runs that name none. It replaces the present default."}


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
    """Staff can set secret headers but never see them. The stored value is not read: it may be that no key
    decrypts it.
    """

    node_type = forms.ChoiceField(
        label="Type",
        choices=[(name, kind.label) for name, kind in TYPES.items()],
        widget=UnfoldAdminSelectWidget,
        help_text=f"Built in are {', '.join(builtin.TOOLS)}.",
    )

    price = CreditsField(label="Price of a call", help_text="Credits: the estimate and the maximum of a call.")
    input_schema = ObjectField(required=False, initial=dict, help_text="The JSON Schema of the input: an object.")
    new_secret_headers = forms.CharField(
        required=False,
        label="Secret headers",
        max_length=10_000,
        widget=UnfoldAdminPasswordWidget,
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty keeps the stored headers.',
    )
    forget_secret_headers = forms.BooleanField(required=False, label="Delete the stored secret headers")
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if tool := builtin.TOOLS.get(self.instance.name):
            self.fields["price"].help_text += f" This built-in tool's own price is {money.to_text(tool.price)}."
            self.fields["input_schema"].help_text += f" This built-in tool's own is {to_text(tool.input_schema)}"

    def clean_name(self) -> str:
        if not NAME.fullmatch(self.cleaned_data["name"]):
            raise ValidationError("Use letters, digits, _ and - only: models accept no other names.")
        return str(self.cleaned_data["name"])

    def clean_new_secret_headers(self) -> str:
        headers: str = self.cleaned_data["new_secret_headers"]
        require(parse_headers, headers)
        return headers

    def clean_input_schema(self) -> Any:
        schema = self.cleaned_data["input_schema"] or {}
        require(check_schema, schema)
        return schema

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        node_type = data.get("node_type")
        if node_type in TYPES and TYPES[node_type].needs_url and not is_address(data.get("url", "")):
            self.add_error("url", "A tool of this type needs an http(s) address without credentials.")
        if node_type == BUILTIN and data.get("name") not in builtin.TOOLS:
            self.add_error("node_type", f"The built-in tools are {', '.join(builtin.TOOLS)}.")
        if data.get("forget_secret_headers"):
            self.instance.secret_headers = None
        elif data.get("new_secret_headers"):
            self.instance.secret_headers = data["new_secret_headers"]
        return data


def require(check: Callable[[Any], Any], value: Any) -> None:
    """Show the ValueError of a check as an error of the form."""
    try:
        check(value)
    except ValueError as error:
        raise ValidationError(str(error)) from None


def is_address(url: str) -> bool:
    return is_web_address(url) and "@" not in urlsplit(url).netloc


@admin.register(Tool)
class ToolAdmin(CatalogueAdmin):
    form = ToolForm
    list_display = ("name", "node_type", "credits", "approval", "repeatable", "secret", "enabled")
    # The fields for staff who may view but not change. The secret headers are not one of them.
    view_fields = tuple(name for name in ToolForm.Meta.fields if name != "price")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tool]:
        return super().get_queryset(request).defer("secret_headers")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is not None and not self.has_change_permission(request, obj):
            return (*self.view_fields, "credits", "secret")
        return super().get_fields(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return ("credits", "secret") if obj is not None and not self.has_change_permission(request, obj) else ()

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # The next migration would add the row again, enabled. Staff disable it instead.
        builtin_row = obj is not None and obj.node_type == BUILTIN and obj.name in builtin.TOOLS
        return not builtin_row and super().has_delete_permission(request, obj)

    @admin.display(description="price (credits)")
    def credits(self, tool: Tool) -> str:
        return money.to_text(tool.price)

    @admin.display(description="secret headers")
    def secret(self, tool: Tool) -> str:
        return "set" if Tool.objects.filter(pk=tool.pk, secret_headers__isnull=False).exists() else "–"
