"""The admin of users. The page of each takes a fixed number of queries, each of a few rows that an index has in this
order, and shows no text of the user.
"""

import time
from collections import Counter
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as PlainUserAdmin
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet, Sum
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from apikeys.models import ApiKey
from config.kernel.errors import Conflict
from config.staff.actions import ActionForm, Did, WithActions, staff_action
from config.staff.base import amount, page_of, user_link
from credits import statement
from credits.models import CHARGES, Account, DayTotal, LedgerEntry
from runs import privacy
from runs.admin.reports import chart_by_day, first_day
from runs.admin.timeline import reasons
from runs.models import Run, RunStatus
from webhooks.models import Delivery, Endpoint

admin.site.unregister(User)

DAYS, ROWS_MAX = 30, 10
# The latest runs whose models and agents are counted.
RUNS_COUNTED = 200
RUN_COLUMNS = ("status", "created_at", "resolved_model", "agent_name", "error_code", "failure_reason")
# How long one request erases a person. `manage.py erase_user` has no limit.
ERASE_SECONDS = 20


@staff_action("auth.change_user", icon="block", danger=True, offered=lambda user: user.is_active)
def block(request: HttpRequest, user: User, data: dict[str, Any]) -> Did:
    """The service refuses this user from now on. Runs that have started go on."""
    if user == request.user:
        raise Conflict("You cannot block yourself.")
    user.is_active = False
    user.save(update_fields=["is_active"])
    return Did(user, "Blocked.")


@staff_action("auth.change_user", icon="lock_open", offered=lambda user: not user.is_active)
def unblock(request: HttpRequest, user: User, data: dict[str, Any]) -> Did:
    """The service accepts this user again."""
    user.is_active = True
    user.save(update_fields=["is_active"])
    return Did(user, "Unblocked.")


@staff_action("runs.read_run_content", icon="download")
def export(request: HttpRequest, user: User, data: dict[str, Any]) -> Did:
    """A file with all that is kept of this user, messages and files included. The log records it."""
    lines = StreamingHttpResponse((f"{line}\n" for line in privacy.export(user)), content_type="application/x-ndjson")
    lines["Content-Disposition"] = f'attachment; filename="user-{user.pk}.jsonl"'
    return Did(user, "Exported.", lines)


class EraseForm(ActionForm):
    reason = forms.CharField(max_length=200, help_text="Stored in the log. It must not name the person.")


@staff_action(
    "auth.delete_user",
    form=EraseForm,
    icon="delete_forever",
    danger=True,
    atomic=False,
    offered=lambda user: not (user.is_staff or user.is_superuser),
)
def erase(request: HttpRequest, user: User, data: dict[str, Any]) -> Did:
    """All content, files, events and names of this user are removed, permanently. Runs are cancelled.
    The ledger stays, under a pseudonym. With many chats, this takes several steps.
    """
    # After this time, the request stops and says how far it is. A repetition continues.
    end = time.monotonic() + ERASE_SECONDS

    def report(step: str, done: int, total: int) -> None:
        if time.monotonic() > end:
            raise privacy.NotErased(f"So far: {done} of {total} {step}.")

    try:
        privacy.erase(user, data["reason"], report, request.user)
    except privacy.NotErased as error:
        raise Conflict(f"The user is blocked. Not everything is erased yet. {error} Continue with the rest.") from None
    return Did(User.objects.get(pk=user.pk), "Erased.", logged=True)


@admin.register(User)
class UserAdmin(WithActions, PlainUserAdmin):
    """Accounts that are made here are of staff: the other users appear with their first request."""

    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    # Unfold's empty value would come first.
    add_fieldsets = PlainUserAdmin.add_fieldsets
    ordering = ("-pk",)
    search_fields = ("pk",)
    search_help_text = "A user's name, e-mail address or id"
    list_display = (user_link, "email", "is_staff", "is_active", "date_joined", "last_login")
    list_display_links = None
    user_field = "pk"
    list_filter = ("is_staff", "is_superuser", "is_active")
    staff_actions = (block, unblock, export, erase)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        # A name is a ``sub``, which the identity provider gives.
        return ("username",) if obj else ()

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        obj.is_staff = obj.is_staff or not change
        super().save_model(request, obj, form, change)

    def home(self, row: User) -> str:
        return reverse("person", args=[row.pk])


def show(request: HttpRequest, user_id: int) -> HttpResponse:
    """The page of a user, with the panels that the signed-in person may see."""
    may = request.user.has_perm
    if not may("auth.view_user"):
        raise PermissionDenied
    # A larger number than the database's integers is the id of nobody.
    user = get_object_or_404(User, pk=min(user_id, 2**31 - 1))
    account = Account.objects.filter(pk=user.pk).first() or Account(user=user)
    panels: dict[str, Any] = {}
    if may("credits.view_account"):
        amounts = {"Balance": account.balance, "Held": account.held, "Available": account.available}
        panels["account"] = [(label, amount(micro)) for label, micro in amounts.items()]
        days = DayTotal.objects.filter(account_id=user.pk, day__gte=first_day(DAYS)).order_by().values_list("day")
        spent = dict(days.annotate(total=Sum("amount")))
        panels["spend"] = chart_by_day(DAYS, [("credits", spent)] if spent else [])
    if may("credits.view_ledgerentry"):
        charges = LedgerEntry.objects.filter(account=user.pk, type__in=CHARGES)
        entries = _latest(charges.select_related("account__user", "against", "staff"))
        panels["charges"] = [(entry, statement.sentence(entry)) for entry in entries]
    if may("runs.view_run"):
        # Not the columns with what callers give, which can have megabytes.
        runs = Run.objects.filter(user=user).only(*RUN_COLUMNS)
        latest = _latest(runs, RUNS_COUNTED)
        panels["runs"] = [(run, page_of(Run, run.pk), RunStatus.tones()[run.status]) for run in latest[:ROWS_MAX]]
        panels["used"] = [
            (what, Counter(name for run in latest if (name := getattr(run, field))).most_common(ROWS_MAX))
            for what, field in (("Models", "resolved_model"), ("Agents", "agent_name"))
        ]
        panels["counted"] = len(latest)
        failed = _latest(runs.filter(status=RunStatus.FAILED))
        panels["failures"] = [(run, page_of(Run, run.pk), reasons(run)[-1:]) for run in failed]
    if may("apikeys.view_apikey"):
        panels["keys"] = _latest(ApiKey.objects.filter(user=user).defer("digest"))
    if may("webhooks.view_endpoint"):
        endpoints = Endpoint.objects.filter(user=user, deleted_at=None).defer("secret", "secondary_secret", "url")
        panels["endpoints"] = _latest(endpoints)
    if may("webhooks.view_delivery"):
        dead = Delivery.objects.filter(user=user, status=Delivery.Status.DEAD)
        panels["dead"] = _latest(dead.defer("body"))
    model_admin: Any = admin.site.get_model_admin(User)
    accounts: Any = admin.site.get_model_admin(Account)
    buttons = accounts.buttons(request, account) + model_admin.buttons(request, user)
    context = {"person": user, "panels": panels, "actions_detail": buttons}
    return model_admin.page(request, "admin/runs/person.html", user.get_username(), original=user, **context)


def _latest(rows: QuerySet[Any], limit: int = ROWS_MAX) -> list[Any]:
    return list(rows.order_by("-created_at", "-pk")[:limit])
