"""Actions of staff on rows: an optional form, a confirmation page, the service function that the API also calls, and a
log entry in the same transaction. Each row has its own transaction.
"""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import path
from unfold.enums import ActionVariant

from config.kernel.errors import DomainError
from config.staff.base import StaffAdmin
from config.staff.forms import StaffForm

OBJECTS_MAX = 100


class ActionForm(StaffForm, forms.Form):
    """The form of an action. ``target`` is the row that the action changes, or None."""

    # A new value on each confirmation page, so that a page submitted twice takes effect once.
    nonce = forms.CharField(widget=forms.HiddenInput, required=False, max_length=32)

    def __init__(self, *args: Any, target: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.target = target

    def facts(self) -> list[tuple[str, str]]:
        """(label, value) of what staff need to know; for a form that is filled in, also what will follow."""
        return []


@dataclass(frozen=True)
class Did:
    """What an action has changed, for the log, if not ``logged`` already. ``answer`` replaces the row's page."""

    row: Model
    text: str
    answer: HttpResponseBase | None = None
    logged: bool = False


@dataclass(frozen=True)
class Action:
    """``apply`` (request, row or None, cleaned data) makes the change. It returns None if there was nothing to do, and
    raises DomainError to refuse. ``about``: "one" row, "some" rows of the list or one row, or "none" (a new row).
    """

    name: str
    label: str
    permission: str
    question: str
    apply: Callable[[HttpRequest, Any, dict[str, Any]], Did | None]
    form: type[ActionForm] | None = None
    about: str = "one"
    icon: str = ""
    danger: bool = False
    # False: it has several steps, each with its own transaction.
    atomic: bool = True
    # Whether a row's page offers the action: a finished run, for example, cannot be cancelled.
    offered: Callable[[Any], bool] = lambda row: True

    def button(self, link: str) -> dict[str, Any]:
        variant = ActionVariant.DANGER if self.danger else ActionVariant.DEFAULT
        return {"title": self.label, "icon": self.icon, "variant": variant, "attrs": {}, "path": link}

    def form_of(self, rows: list[Any], data: Any = None) -> ActionForm | None:
        return self.form(data, target=rows[0] if rows else None) if self.form is not None else None


def staff_action(permission: str, **options: Any) -> Callable[[Callable[..., Did | None]], Action]:
    """A decorator that makes an Action from its ``apply``. The function's name becomes the action's name and label, its
    docstring the question of the confirmation page; ``options`` are other fields of Action, or replace these.
    """

    def declare(apply: Callable[..., Did | None]) -> Action:
        name, question = apply.__name__, " ".join((apply.__doc__ or "").split())
        given = {"name": name.replace("_", "-"), "label": name.capitalize(), "question": question} | options
        return Action(**given, permission=permission, apply=apply)

    return declare


class WithActions(StaffAdmin):
    staff_actions: ClassVar[tuple[Action, ...]] = ()

    def get_urls(self) -> list[Any]:
        view, name = self.admin_site.admin_view(self.act), f"{self.opts.app_label}_{self.opts.model_name}_do"
        one = path("<path:object_id>/do/<slug:name>/", view, name=f"{name}_one")
        return [path("do/<slug:name>/", view, name=name), one, *super().get_urls()]

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """The actions of the list. Django calls the function; the later steps use the action's own address."""

        def chosen(action: Action, model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse:
            return self.ask(request, action, list(rows[:OBJECTS_MAX]))

        return super().get_actions(request) | {
            action.name: (partial(chosen, action), action.name, action.label)
            for action in self._allowed(request, "some")
        }

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        response = super().changelist_view(request, extra_context)
        if isinstance(response, TemplateResponse) and response.context_data is not None:
            allowed = self._allowed(request, "none")
            response.context_data["actions_list"] = [each.button(self.url("do", each.name)) for each in allowed]
        return response

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any) -> Any:
        row = context.get("original")
        if row is not None:
            context["actions_detail"] += self.buttons(request, row)
        return super().render_change_form(request, context, *args, **options)

    def buttons(self, request: HttpRequest, row: Any) -> list[dict[str, Any]]:
        """The actions that the signed-in person may do with this row."""
        offered = [action for action in self._allowed(request, "one", "some") if action.offered(row)]
        return [action.button(self.url("do_one", row.pk, action.name)) for action in offered]

    def _allowed(self, request: HttpRequest, *about: str) -> list[Action]:
        may = request.user.has_perm
        return [action for action in self.staff_actions if action.about in about and may(action.permission)]

    def act(self, request: HttpRequest, name: str, object_id: str | None = None) -> HttpResponseBase:
        action = next((action for action in self.staff_actions if action.name == name), None)
        if action is None or (object_id is not None and action.about == "none"):
            raise Http404
        if not (request.user.has_perm(action.permission) and self.has_view_permission(request)):
            raise PermissionDenied
        rows = [self.row(request, object_id)] if object_id is not None else self._chosen(request, action)
        if not rows and action.about != "none":
            messages.warning(request, "Choose a row first. Nothing was changed.")
            return HttpResponseRedirect(self.url("changelist"))
        if request.method != "POST":
            return self.ask(request, action, rows)
        form = action.form_of(rows, request.POST)
        if request.POST.get("step") == "confirm" and (form is None or form.is_valid()):
            return self.do(request, action, rows, form)
        return self.ask(request, action, rows, form)

    def _chosen(self, request: HttpRequest, action: Action) -> list[Any]:
        ids = list(filter(self.is_key, request.POST.getlist(ACTION_CHECKBOX_NAME)))
        most = {"none": 0, "one": 1, "some": OBJECTS_MAX}[action.about]
        return list(self.get_queryset(request).filter(pk__in=ids[:most]))

    def ask(
        self, request: HttpRequest, action: Action, rows: list[Any], form: ActionForm | None = None
    ) -> HttpResponse:
        """Show the form, or the confirmation if there is no form or if it is filled in."""
        form = form or action.form_of(rows)
        context = {"action": action, "rows": rows, "form": form, "confirm": form is None or form.is_valid()}
        context |= {"nonce": uuid.uuid4().hex, "checkbox": ACTION_CHECKBOX_NAME, "target": self.url("do", action.name)}
        row = rows[0] if len(rows) == 1 else None
        return self.page(request, "staff/action.html", action.label, row, **context)

    def do(self, request: HttpRequest, action: Action, rows: list[Any], form: ActionForm | None) -> HttpResponseBase:
        done = []
        for row in rows or [None]:
            # The row may have changed while the confirmation page was open. If there is a form, it says why it refuses.
            if row is not None and form is None and not action.offered(row):
                continue
            try:
                with transaction.atomic() if action.atomic else nullcontext():
                    did = action.apply(request, row, form.cleaned_data if form is not None else {})
                    if did is not None:
                        if not did.logged:
                            self.log_change(request, did.row, did.text)
                        done.append(did)
            except DomainError as error:
                if form is not None:
                    for name, texts in ((error.details or {}).get("fields") or {"": error.message}).items():
                        form.add_error(name if name in form.fields else None, texts)
                    return self.ask(request, action, rows, form)
                messages.error(request, f"{row}: {error.message}")
        if len(done) == 1 and done[0].answer is not None:
            return done[0].answer
        if done:
            text = f"{done[0].row}: {done[0].text}" if len(done) == 1 else f"{len(done)} done: {action.label}."
            messages.success(request, text)
        else:
            messages.warning(request, "Nothing was changed.")
        about = rows or [did.row for did in done]
        if len(about) == 1 and isinstance(about[0], self.model):
            return HttpResponseRedirect(self.home(about[0]))
        return HttpResponseRedirect(self.url("changelist"))
