"""Accounts and the ledger, read-only. Staff grant, adjust and refund through ``ledger.py``, the only writer."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from unfold.decorators import display
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget

from config.kernel import clock, money
from config.staff.actions import Action, ActionForm, Did, WithActions
from config.staff.base import ReadOnly, link_column, users_named
from config.staff.forms import CreditsField, ReasonField
from credits import ledger
from credits.models import CORRECTIONS, GRANT_DAYS_MAX, REASON_MAX_CHARS, SETTLEMENTS, Account, EntryType, LedgerEntry

RUN = link_column("run_id", "run")
REFUNDABLE = (EntryType.CAPTURE, EntryType.USAGE)


def credits_column(name: str) -> Any:
    @admin.display(description=f"{name} (credits)")
    def column(self: Any, row: Any) -> str:
        return money.to_text(getattr(row, name))

    return column


class UserField(forms.CharField):
    """A user's name, e-mail address or id → the user's id."""

    widget = UnfoldAdminTextInputWidget

    def clean(self, value: Any) -> int:
        word = super().clean(value)
        found = users_named(word)
        if len(found) != 1:
            raise ValidationError(f"There is no user {word}." if not found else f"More than one user matches {word}.")
        return found[0]


class GrantForm(ActionForm):
    """For the account on which the action is called, or for the user named in the form."""

    user = UserField(max_length=254, help_text="Name, e-mail address or id")
    amount = CreditsField(minimum=1, label="Credits")
    days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=GRANT_DAYS_MAX,
        widget=UnfoldAdminIntegerFieldWidget,
        label="Expire after days",
        help_text="The unspent part of the grant is then removed. Empty: never.",
    )
    reason = ReasonField(REASON_MAX_CHARS)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.target is not None:
            del self.fields["user"]


class AdjustForm(ActionForm):
    amount = CreditsField(
        minimum=None, label="Credits", help_text="A negative amount removes credits, even below zero."
    )
    reason = ReasonField(REASON_MAX_CHARS)


class RefundForm(ActionForm):
    amount = CreditsField(minimum=1, label="Credits", help_text="At most the part of the row that is not refunded yet.")
    reason = ReasonField(REASON_MAX_CHARS)


def once(name: str, done: str, move: Callable[..., Model]) -> Callable[..., Did | None]:
    """The ``apply`` of an action: one confirmation page moves credits once, even if it is sent twice."""

    def apply(request: HttpRequest, row: Any, data: dict[str, Any]) -> Did | None:
        cause = f"staff:{name}:{data['nonce'] or uuid.uuid4().hex}"
        if LedgerEntry.objects.filter(cause=cause).exists():
            return None
        moved = move(row, data, cause=cause, reason=data["reason"], staff=request.user)
        return Did(moved, f"{done} {money.to_text(data['amount'])}: {data['reason']}")

    return apply


def grant(account: Account | None, data: dict[str, Any], **common: Any) -> Account:
    user_id = account.pk if account is not None else data["user"]
    expires_at = clock.now() + timedelta(days=data["days"]) if data["days"] else None
    ledger.grant(user_id, data["amount"], expires_at=expires_at, **common)
    return ledger.account_for(user_id)


def adjust(account: Account, data: dict[str, Any], **common: Any) -> Account:
    ledger.adjust(account.pk, data["amount"], **common)
    return account


def refund(entry: LedgerEntry, data: dict[str, Any], **common: Any) -> LedgerEntry:
    ledger.refund(entry.pk, data["amount"], **common)
    return entry


GRANT = Action(
    name="grant",
    label="Grant credits",
    permission="credits.grant_credits",
    question="The credits can be spent at once.",
    apply=once("grant", "Granted", grant),
    form=GrantForm,
    about="one",
    icon="add_card",
)


@admin.register(Account)
class AccountAdmin(ReadOnly, WithActions):
    balance_credits = credits_column("balance")
    held_credits = credits_column("held")
    available_credits = credits_column("available")
    list_display = ("user", "balance_credits", "held_credits", "available_credits", "updated_at", "rows")
    fields = ("user", "balance_credits", "held_credits", "available_credits", "rows", "created_at", "updated_at")
    readonly_fields = ("balance_credits", "held_credits", "available_credits", "rows")
    search_help_text = "A user's name, e-mail address or id"
    staff_actions = (
        GRANT,
        replace(GRANT, name="grant_to", about="none"),
        Action(
            name="adjust",
            label="Adjust account",
            permission="credits.adjust_credits",
            question="The correction stays in the ledger permanently, with your name and the reason.",
            apply=once("adjust", "Adjusted by", adjust),
            form=AdjustForm,
            about="one",
            icon="balance",
        ),
    )

    @admin.display(description="ledger")
    def rows(self, account: Account) -> str:
        url = reverse("admin:credits_ledgerentry_changelist")
        return format_html('<a href="{}?account__user__id__exact={}">Ledger</a>', url, account.pk)


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnly, WithActions):
    amount_credits = credits_column("amount")
    list_display = ("id", "account_user", "kind", "amount_credits", "tool_key", RUN, "reason", "created_at")
    fields = (
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
    )
    readonly_fields = ("amount_credits",)
    list_filter = ("type",)
    search_help_text = "Entry, run, tool call or user"
    list_select_related = ("account__user",)
    url_lookups = ("account__user__id__exact",)
    user_field = "account"
    id_fields = {"run": "run_id"}
    staff_actions = (
        Action(
            name="refund",
            label="Refund",
            permission="credits.refund_credits",
            question="The credits return to the account and can be spent at once.",
            apply=once("refund", "Refunded", refund),
            form=RefundForm,
            about="one",
            icon="undo",
            offered=lambda entry: entry.type in REFUNDABLE,
        ),
    )

    def find(self, word: str) -> Q:
        if word.startswith("inv_"):
            held = LedgerEntry.objects.filter(cause=f"hold:{word}").values_list("pk", flat=True).first()
            return Q(pk__in=_with_settlements(held)) if held else Q(pk__in=())
        return super().find(word)

    def get_queryset(self, request: HttpRequest) -> QuerySet[LedgerEntry]:
        return super().get_queryset(request).select_related("account__user", "staff")

    @admin.display(description="account")
    def account_user(self, entry: LedgerEntry) -> str:
        return entry.account.user.get_username()

    @display(description="type", label={entry.value: entry.tone for entry in EntryType})
    def kind(self, entry: LedgerEntry) -> str:
        return entry.type


def _with_settlements(held: str) -> list[str]:
    """The ids of a hold, of its settlements and of the refunds of its capture."""
    # The filters on type allow the partial indexes on ``against``.
    settlements = list(LedgerEntry.objects.filter(against=held, type__in=SETTLEMENTS).values_list("pk", flat=True))
    refunds = LedgerEntry.objects.filter(against__in=settlements, type__in=CORRECTIONS).values_list("pk", flat=True)
    return [held, *settlements, *refunds]
