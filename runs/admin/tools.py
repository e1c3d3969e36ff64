"""The catalogue's tools, and what all its pages share. Prices are in credits; secrets are never shown."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.db.models.signals import post_delete, post_save
from django.dispatch import receiver
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.html import format_html
from unfold.decorators import action

from config.kernel import money
from config.kernel.encryption import DecryptionFailed
from config.kernel.jsontext import to_text
from config.outbound.addresses import same_server
from config.staff.base import StaffAdmin, column, credits_column
from config.staff.forms import CreditsField, LinesField, ObjectField, SecretField, StaffForm
from runs import catalogue
from runs.catalogue import file, rules
from runs.catalogue.imports import import_mcp
from runs.catalogue.rules import fits
from runs.models import AgentModel, Provider, Tool
from runs.tools import builtin, schema
from runs.tools.base import BUILTIN, HTTP, PARK_SECONDS, ToolDefinition, parse_headers, parse_signing_secret
from runs.tools.dispatch import TYPES, try_tool
from runs.tools.schema import check_schema
from webhooks.admin import EndpointAdmin, is_installation
from webhooks.models import Endpoint

FORGETS = "With another scheme, host or port, the stored secrets are deleted unless new ones are given."


class ListedAdmin(StaffAdmin):
    """The pages of rows that the catalogue file may list: its next apply undoes what staff change in them."""

    # The table of the file that lists such rows.
    table: ClassVar[str] = ""

    def changeform_view(self, request: HttpRequest, object_id: str | None = None, *args: Any, **options: Any) -> Any:
        answer = super().changeform_view(request, object_id, *args, **options)
        row = self.get_object(request, unquote(object_id)) if object_id else None
        if row is not None and settings.CATALOGUE_FILE:
            self.say_listed(request, row, settings.CATALOGUE_FILE)
        return answer

    def say_listed(self, request: HttpRequest, row: Any, source: str) -> None:
        with suppress(OSError, ValueError):  # an apply says what is wrong with the file
            if listed := file.standing(source, Path(source).read_bytes(), self.table, getattr(row, "name", "")):
                line, fields = listed
                where = f"{source}, line {line}, lists {row}"
                will = f" It will set {', '.join(fields)}." if fields else ""
                said = f"{where}: the next apply of the file undoes changes that are made here.{will}"
                messages.add_message(request, messages.WARNING if fields else messages.INFO, said)


admin.site.unregister(Endpoint)


@admin.register(Endpoint)
class ListedEndpointAdmin(ListedAdmin, EndpointAdmin):
    table = "installationEndpoint"

    def say_listed(self, request: HttpRequest, row: Endpoint, source: str) -> None:
        if is_installation(row):
            super().say_listed(request, row, source)


class CatalogueAdmin(ListedAdmin):
    """Few rows that change rarely. Each process reads a change within seconds."""

    ordering = ("name",)
    search_fields = ()
    list_disable_select_all = False
    # For staff who may view but not change.
    view_fields: ClassVar[tuple[Any, ...]]

    def _changeform_view(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        if request.method == "POST":  # in a transaction
            rules.lock()
        return super()._changeform_view(request, *args, **options)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        may_change = obj is None or self.has_change_permission(request, obj)
        return super().get_fields(request, obj) if may_change else self.view_fields


@receiver((post_save, post_delete), sender=Provider)
@receiver((post_save, post_delete), sender=AgentModel)
@receiver((post_save, post_delete), sender=Tool)
def forget_catalogue(sender: Any, **kwargs: Any) -> None:
    catalogue.forget()


class ToolForm(StaffForm, forms.ModelForm):
    node_type = forms.ChoiceField(
        label="Type",
        initial=HTTP,
        choices=[(name, kind.label) for name, kind in sorted(TYPES.items(), key=lambda one: one[0] != HTTP)],
        help_text=f"Built in are {', '.join(builtin.TOOLS)}.",
    )

    price = CreditsField(label="Price of a call", help_text="Credits: the estimate and the maximum of a call.")
    input_schema = ObjectField(validators=[fits(check_schema)], help_text="The JSON Schema of the input: an object.")
    new_secret_headers = SecretField(
        label="Secret headers",
        max_length=rules.HEADERS_MAX_CHARS,
        validators=[fits(parse_headers)],
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty keeps the stored headers.',
    )
    forget_secret_headers = forms.BooleanField(required=False, label="Delete the stored secret headers")
    new_signing_secret = SecretField(
        label="Signing secret",
        max_length=rules.SIGNING_SECRET_MAX_CHARS,
        validators=[fits(parse_signing_secret)],
        help_text="With it, calls of an HTTP endpoint are signed (Standard Webhooks): base64, best of 32 random bytes. "
        "Empty keeps the stored secret.",
    )
    forget_signing_secret = forms.BooleanField(required=False, label="Delete the stored signing secret")
    timeout_seconds = forms.FloatField(
        required=False,
        min_value=rules.TIMEOUT[0],
        max_value=rules.TIMEOUT[1],
        label="Time limit",
        help_text="Seconds for a call. Empty: TOOL_TIMEOUT_SECONDS.",
    )

    park_seconds = forms.IntegerField(
        label="Seconds until a parked call expires",
        required=False,
        min_value=PARK_SECONDS[0],
        max_value=PARK_SECONDS[-1],
        help_text="The tool may answer 202 and call back within this time. Empty: a 202 is a result.",
    )

    class Meta:
        model = Tool
        field_classes: ClassVar = {"description": LinesField}
        labels: ClassVar = {"url": "Address"}
        help_texts: ClassVar = {
            "cancel_url": f"Told of calls that are cancelled or expire while they await their callback. {FORGETS}",
            "unsigned_callbacks": "Callbacks need no signature although the tool has a signing secret.",
            "name": "Models and requests use it: letters, digits, _ and -.",
            "display_name": "What people see.",
            "description": "Tells the model what the tool does and when to use it.",
            "provider_cost_percent": "Of the price: what a call costs you. The reports show the rest as your margin.",
            "approval": "When a call waits until its user agrees.",
            "repeatable": "Whether a call may be made again if its outcome was lost with its worker.",
            "url": f"Of an HTTP tool: where its calls are sent. Of an MCP tool: its server. {FORGETS}",
            "remote_name": "The tool's name on its server. Empty: the same.",
            "enabled": "Whether runs can call it.",
        }
        described = ["name", "display_name", "description", "node_type", "input_schema", "price"]
        called = ["provider_cost_percent", "approval", "timeout_seconds", "repeatable", "url", "remote_name"]
        parked = ["park_seconds", "cancel_url", "unsigned_callbacks"]
        fields = [*described, *called, *parked, "enabled"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if tool := builtin.TOOLS.get(self.instance.name):
            self.fields["price"].help_text += f" This built-in tool's own price is {money.to_text(tool.price)}."
            self.fields["input_schema"].help_text += f" This built-in tool's own is {to_text(tool.input_schema)}"

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        given = {name: data.get(name, "") for name in ("name", "node_type", "url", "cancel_url")}
        for name, problem in rules.problems_of_tool(**given, price=data.get("price") or 0).items():
            if name not in self.errors:
                self.add_error(name, problem)
        secrets = ("secret_headers", "signing_secret")
        before, after, told = self.instance.url, data.get("url", ""), data.get("cancel_url", "")
        if told and not any(same_server(told, known) for known in (before, self.instance.cancel_url)):
            after = told  # it gets them too
        set_secrets(self, secrets, before, after)
        return data


def set_secrets(form: forms.ModelForm, names: Sequence[str], before: str, after: str) -> None:
    """Set the new secrets, and forget those that staff delete. If the address ``after`` is of another server than
    ``before``, forget the rest too: who may change an address must not learn the stored secrets.
    """
    moved = form.instance.pk is not None and not same_server(before, after)
    for name in names:
        forgotten, secret = form.cleaned_data.get(f"forget_{name}"), form.cleaned_data.get(f"new_{name}")
        if forgotten or secret or moved:
            setattr(form.instance, name, None if forgotten else secret or None)


class ImportForm(StaffForm, forms.Form):
    url = forms.CharField(label="Address", max_length=2048, help_text="The server's streamable-HTTP address.")
    headers = SecretField(
        label="Secret headers",
        max_length=rules.HEADERS_MAX_CHARS,
        help_text='A JSON object such as {"Authorization": "Bearer …"}; empty: none, and known tools keep theirs.',
    )
    names_begin_with = forms.CharField(required=False, max_length=32, help_text="For names that are taken here.")
    price = CreditsField(initial="0", label="Price of a call", help_text="Credits, of new tools.")
    enabled = forms.BooleanField(
        required=False,
        label="Enable new tools",
        help_text="At once every run can call them, except runs of agents with tools of their own.",
    )


class TryForm(StaffForm, forms.Form):
    arguments = forms.CharField(
        initial="{}", max_length=schema.TOOL_INPUT_MAX_CHARS, widget=forms.Textarea(attrs={"rows": 8})
    )


def has(tool: Tool, secret: str) -> bool:
    return Tool.objects.filter(pk=tool.pk, **{f"{secret}__isnull": False}).exists()


@admin.register(Tool)
class ToolAdmin(CatalogueAdmin):
    table = "tools"
    form = ToolForm
    unread = ("secret_headers", "signing_secret")
    credits = credits_column("price", "price (credits)")
    secret = column("secret headers", lambda tool: "set" if has(tool, "secret_headers") else "–")
    signed = column("signed", lambda tool: has(tool, "signing_secret"), boolean=True)
    actions_list = ("import_tools",)
    actions_detail = ("try_it",)
    list_display = ("name", "node_type", "credits", "approval", "secret", "signed", "enabled")
    view_fields = (*(name for name in ToolForm.Meta.fields if name != "price"), "credits", "secret", "signed")
    # Each is shown for the types of tools that use it.
    of_servers = ("url", "new_secret_headers", "forget_secret_headers", "park_seconds")
    of_http = ("new_signing_secret", "forget_signing_secret", "cancel_url", "unsigned_callbacks")
    conditional_fields: ClassVar[dict[str, str]] = {
        **dict.fromkeys(of_servers, f"{[name for name, kind in TYPES.items() if kind.needs_url]}.includes(node_type)"),
        **dict.fromkeys(of_http, "node_type == 'http'"),
        "remote_name": "node_type == 'mcp'",
    }

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # The next migration would add the row again, enabled. Staff disable it instead.
        builtin_row = obj is not None and obj.node_type == BUILTIN and obj.name in builtin.TOOLS
        return not builtin_row and super().has_delete_permission(request, obj)

    def save_model(self, request: HttpRequest, obj: Tool, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if obj.node_type == HTTP:
            link = format_html('<a href="{}">Try it</a>', self.url("try_it", obj.pk))
            messages.info(request, format_html("{} is saved: {}.", obj.name, link))

    @action(description="Import tools", icon="download", url_path="import", permissions=["add", "change"])
    def import_tools(self, request: HttpRequest) -> HttpResponse:
        """The tools of an MCP server become rows; POST reads its list."""
        form = ImportForm(request.POST or None)
        imported = None
        if request.method == "POST" and form.is_valid():
            try:
                given = dict(form.cleaned_data)
                imported = import_mcp(prefix=given.pop("names_begin_with"), **given)
            except ValueError as error:
                form.add_error(None, str(error))
            else:
                for tool in imported["added"]:
                    self.log_addition(request, tool, "Imported it.")
                for tool in imported["changed"]:
                    self.log_change(request, tool, "Imported it again.")
        return self.page(request, "admin/runs/tool/import.html", "Import tools", form=form, imported=imported)

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> Any:
        row: Any = self.get_object(request, object_id)
        return super().get_actions_detail(request, object_id) if row is not None and row.node_type == HTTP else []

    @action(description="Try it", icon="play_arrow", url_path="try", permissions=["change"])
    def try_it(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """One call of an HTTP tool, and what came; POST makes it."""
        row = self.row(request, object_id)
        if row.node_type != HTTP:
            raise Http404
        trial = problem = None
        form = TryForm(request.POST or None)
        if request.method == "POST" and form.is_valid():
            try:
                definition = ToolDefinition.from_row(Tool.objects.get(pk=row.pk))
                trial = try_tool(definition, form.cleaned_data["arguments"], request.user.pk or 0, str(request.user))
                came = trial["failure"].code if "failure" in trial else "it answered"
                self.log_change(request, row, f"Tried it: {came}.")
            except (DecryptionFailed, ValueError) as error:
                problem = str(error)
        found = {"form": form, "trial": trial, "problem": problem}
        return self.page(request, "admin/runs/tool/try.html", "Try it", row, **found)
