"""The catalogue's tools, and what all its pages share. Prices are in credits; secrets are never shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.validators import ProhibitNullCharactersValidator
from django.db.models import QuerySet
from django.db.models.signals import post_delete, post_save
from django.dispatch import receiver
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminPasswordWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
)

from config.kernel import money
from config.kernel.encryption import DecryptionFailed
from config.kernel.jsontext import to_text
from config.outbound.urls import same_server
from config.staff.base import StaffAdmin
from config.staff.forms import CreditsField, ObjectField
from runs import catalogue
from runs.catalogue import rules
from runs.catalogue.imports import import_mcp
from runs.models import AgentModel, Provider, Tool
from runs.tools import builtin, schema
from runs.tools.base import BUILTIN, HTTP, ToolDefinition, parse_headers, parse_signing_secret
from runs.tools.dispatch import TYPES
from runs.tools.schema import check_schema
from runs.tools.trial import try_tool

FORGETS = "With another scheme, host or port, the stored secrets are deleted unless new ones are given."


class CatalogueAdmin(StaffAdmin):
    """Few rows that change rarely. Each process reads a change within seconds."""

    ordering = ("name",)
    search_fields = ()
    list_disable_select_all = False


@receiver((post_save, post_delete), sender=Provider)
@receiver((post_save, post_delete), sender=AgentModel)
@receiver((post_save, post_delete), sender=Tool)
def forget_catalogue(sender: Any, **kwargs: Any) -> None:
    catalogue.forget()


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
        max_length=rules.HEADERS_MAX_CHARS,
        widget=UnfoldAdminPasswordWidget,
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty keeps the stored headers.',
    )
    forget_secret_headers = forms.BooleanField(required=False, label="Delete the stored secret headers")
    new_signing_secret = forms.CharField(
        required=False,
        label="Signing secret",
        max_length=rules.SIGNING_SECRET_MAX_CHARS,
        widget=UnfoldAdminPasswordWidget,
        help_text="With it, calls of an HTTP endpoint are signed (Standard Webhooks): base64, best of 32 random bytes. "
        "Empty keeps the stored secret.",
    )
    forget_signing_secret = forms.BooleanField(required=False, label="Delete the stored signing secret")
    timeout_seconds = forms.FloatField(
        required=False,
        min_value=rules.TIMEOUT_MIN_SECONDS,
        max_value=rules.TIMEOUT_MAX_SECONDS,
        widget=UnfoldAdminDecimalFieldWidget,
    )

    class Meta:
        model = Tool
        help_texts = {"url": FORGETS}
        fields = [
            "name",
            "display_name",
            "description",
            "node_type",
            "input_schema",
            "price",
            "provider_cost_percent",
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

    def clean_new_secret_headers(self) -> str:
        headers: str = self.cleaned_data["new_secret_headers"]
        require(parse_headers, headers)
        return headers

    def clean_new_signing_secret(self) -> str:
        secret: str = self.cleaned_data["new_signing_secret"]
        require(parse_signing_secret, secret)
        return secret

    def clean_input_schema(self) -> Any:
        schema = self.cleaned_data["input_schema"] or {}
        require(check_schema, schema)
        return schema

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        given = {column: data.get(column, "") for column in ("name", "node_type", "url")}
        for column, problem in rules.problems_of_tool(**given).items():
            if column not in self.errors:
                self.add_error(column, problem)
        set_secrets(self, ("secret_headers", "signing_secret"), self.instance.url, data.get("url", ""))
        return data


def set_secrets(form: forms.ModelForm, names: Sequence[str], before: str, after: str) -> None:
    """Set the new secrets, and forget those that staff delete, and those that were meant for the server at the address
    ``before`` if ``after`` is another server: who may change an address must not learn what was stored for it.
    """
    moved = form.instance.pk is not None and not same_server(before, after)
    for name in names:
        if form.cleaned_data.get(f"forget_{name}"):
            setattr(form.instance, name, None)
        elif secret := form.cleaned_data.get(f"new_{name}"):
            setattr(form.instance, name, secret.strip())
        elif moved:
            setattr(form.instance, name, None)


def require(check: Callable[[Any], Any], value: Any) -> None:
    """Show the ValueError of a check as an error of the form."""
    try:
        check(value)
    except ValueError as error:
        raise ValidationError(str(error)) from None


class ImportForm(forms.Form):
    url = forms.CharField(
        label="Address",
        max_length=2048,
        widget=UnfoldAdminTextInputWidget,
        help_text="The server's streamable-HTTP address.",
    )
    headers = forms.CharField(
        required=False,
        label="Secret headers",
        max_length=10_000,
        widget=UnfoldAdminPasswordWidget,
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty: none, and known tools keep theirs.',
    )
    names_begin_with = forms.CharField(
        required=False,
        max_length=32,
        widget=UnfoldAdminTextInputWidget,
        help_text="For names that are taken here.",
    )
    price = CreditsField(initial="0", label="Price of a call", help_text="Credits, of new tools.")


class TryForm(forms.Form):
    arguments = forms.CharField(
        initial="{}",
        max_length=schema.TOOL_INPUT_MAX_CHARS,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 8}),
        validators=[ProhibitNullCharactersValidator()],
    )


def who(request: HttpRequest) -> tuple[int, str]:
    """The signed-in staff account: its id and its name."""
    return request.user.pk or 0, request.user.get_username()


@admin.register(Tool)
class ToolAdmin(CatalogueAdmin):
    form = ToolForm
    list_display = ("name", "node_type", "credits", "approval", "repeatable", "secret", "signed", "enabled")
    # The fields for staff who may view but not change. The secrets are not among them.
    view_fields = tuple(name for name in ToolForm.Meta.fields if name != "price")
    shown = ("credits", "secret", "signed")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tool]:
        return super().get_queryset(request).defer("secret_headers", "signing_secret")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is not None and not self.has_change_permission(request, obj):
            return (*self.view_fields, *self.shown)
        return super().get_fields(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.shown if obj is not None and not self.has_change_permission(request, obj) else ()

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # The next migration would add the row again, enabled. Staff disable it instead.
        builtin_row = obj is not None and obj.node_type == BUILTIN and obj.name in builtin.TOOLS
        return not builtin_row and super().has_delete_permission(request, obj)

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view
        return [
            path("import/", view(self.import_view), name="runs_tool_import"),
            path("<path:object_id>/try/", view(self.try_view), name="runs_tool_try"),
            *super().get_urls(),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        response = super().changelist_view(request, extra_context)
        if isinstance(response, TemplateResponse) and response.context_data and self.may_import(request):
            button = {"title": "Import tools", "icon": "download", "attrs": {}}
            response.context_data["actions_list"] = [button | {"path": reverse("admin:runs_tool_import")}]
        return response

    def may_import(self, request: HttpRequest) -> bool:
        return self.has_add_permission(request) and self.has_change_permission(request)

    def import_view(self, request: HttpRequest) -> HttpResponse:
        """The tools of an MCP server become rows; POST reads its list."""
        if not self.may_import(request):
            raise PermissionDenied
        form = ImportForm(request.POST or None)
        imported = None
        if request.method == "POST" and form.is_valid():
            try:
                given = dict(form.cleaned_data)
                imported = import_mcp(prefix=given.pop("names_begin_with"), **given)
            except ValueError as error:
                form.add_error(None, str(error))
            else:
                for tool in imported.added:
                    self.log_addition(request, tool, "Imported it.")
                for tool in imported.changed:
                    self.log_change(request, tool, "Imported it again.")
        context = self.admin_site.each_context(request) | {
            "title": "Import tools",
            "opts": self.opts,
            "form": form,
            "imported": imported,
            "back": reverse("admin:runs_tool_changelist"),
        }
        return TemplateResponse(request, "admin/runs/tool/import.html", context)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any) -> Any:
        tool = context.get("original")
        if tool is not None and tool.node_type == HTTP and self.has_change_permission(request, tool):
            link = reverse("admin:runs_tool_try", args=[tool.pk])
            context["actions_detail"] = [{"title": "Try it", "icon": "play_arrow", "attrs": {}, "path": link}]
        return super().render_change_form(request, context, *args, **options)

    def try_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """One call of an HTTP tool, and what came; POST makes it."""
        row: Any = self.get_object(request, unquote(object_id))
        if row is None or row.node_type != HTTP:
            raise Http404
        if not self.has_change_permission(request, row):
            raise PermissionDenied
        trial = problem = None
        form = TryForm(request.POST or None)
        if request.method == "POST" and form.is_valid():
            try:
                definition = ToolDefinition.from_row(Tool.objects.get(pk=row.pk))
                trial = try_tool(definition, form.cleaned_data["arguments"], *who(request))
                outcome = trial.failure.code if trial.failure else "it answered"
                self.log_change(request, row, f"Tried it: {outcome}.")
            except DecryptionFailed:
                problem = "No key of ENCRYPTION_KEYS decrypts the tool's secrets."
            except ValueError as error:
                problem = str(error)
        used = trial.result.credit_used if trial and trial.result else None
        context = self.admin_site.each_context(request) | {
            "title": "Try it",
            "subtitle": row.name,
            "opts": self.opts,
            "original": row,
            "form": form,
            "trial": trial,
            "credits": money.to_text(row.price if used is None else used),
            "problem": problem,
            "back": reverse("admin:runs_tool_change", args=[row.pk]),
        }
        return TemplateResponse(request, "admin/runs/tool/try.html", context)

    @admin.display(description="price (credits)")
    def credits(self, tool: Tool) -> str:
        return money.to_text(tool.price)

    @admin.display(description="secret headers")
    def secret(self, tool: Tool) -> str:
        return "set" if Tool.objects.filter(pk=tool.pk, secret_headers__isnull=False).exists() else "–"

    @admin.display(description="signed", boolean=True)
    def signed(self, tool: Tool) -> bool:
        return Tool.objects.filter(pk=tool.pk, signing_secret__isnull=False).exists()
