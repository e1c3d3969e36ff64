"""Accounts and the ledger, read-only. Staff grant, adjust and refund through ``ledger.py``, the only writer."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from unfold.views import ChangeList

from config.kernel import clock, money
from config.staff import base
from config.staff.actions import ActionForm, Did, WithActions, staff_action
from config.staff.forms import CreditsField
from credits import ledger, statement, sums
from credits.models import CORRECTIONS, GRANT_DAYS_MAX, REASON_MAX_CHARS, Account, EntryType, LedgerEntry


class MoneyForm(ActionForm):
    """A form that moves credits and shows the balance before and after, of its row's account or a named user's."""

    amount = CreditsField(minimum=1, label="Credits")
    reason = forms.CharField(
        max_length=REASON_MAX_CHARS,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="Stored permanently with the entry; the user can read it.",
    )

    def user_id(self) -> Any:
        return self.target.pk if self.target is not None else self.cleaned_data["user"]

    def facts(self) -> list[tuple[str, str]]:
        filled = self.is_bound and self.is_valid()
        if self.target is None and not filled:
            return []
        user_id = self.user_id()
        account = Account.objects.filter(pk=user_id).first() or Account(pk=user_id)
        held = f" ({money.to_text(account.held)} held)" if account.held else ""
        facts = [("Balance now", statement.in_credits(account.balance) + held)]
        if filled:
            facts.append(("Balance after", statement.in_credits(account.balance + self.cleaned_data["amount"])))
        return facts


class AdjustForm(MoneyForm):
    amount = CreditsField(
        minimum=None, label="Credits", help_text="A negative amount removes credits, even below zero."
    )


class GrantForm(MoneyForm):
    days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=GRANT_DAYS_MAX,
        label="Expire after days",
        help_text="The unspent part of the grant is then removed. Empty: never.",
    )
    field_order = ("user", "amount", "days", "reason")


class NamedGrantForm(GrantForm):
    user = forms.CharField(max_length=254, help_text="Name, e-mail address or id")

    def clean_user(self) -> int:
        word = self.cleaned_data["user"]
        found = base.users_named(word)
        if len(found) != 1:
            raise ValidationError(f"There is no user {word}." if not found else f"More than one user matches {word}.")
        return found[0]


class RefundForm(MoneyForm):
    def user_id(self) -> Any:
        return self.target.account_id

    def clean_amount(self) -> int:
        amount: int = self.cleaned_data["amount"]
        # ``ledger.refund`` itself checks the type of the row, and a confirmation, which may be sent twice.
        checked = self.data.get("step") == "confirm" or not self.target.is_charge
        if not checked and amount > (rest := sums.refundable(self.target)):
            raise ValidationError(f"At most {statement.in_credits(rest)} can still be refunded.")
        return amount

    def facts(self) -> list[tuple[str, str]]:
        if not self.target.is_charge:
            return []
        rest = statement.in_credits(sums.refundable(self.target))
        return [("Charge", statement.sentence(self.target)), ("Can still be refunded", rest), *super().facts()]


def once(request: HttpRequest, row: Any, data: dict[str, Any], done: str, move: Callable[..., object]) -> Did | None:
    """Move credits by ``move``, once for each confirmation page, even if the page is sent twice. ``done`` begins
    the text of the log. Without a ``row``, the form names the user.
    """
    given = {"cause": f"staff:{move.__name__}:{data['nonce'] or uuid.uuid4().hex}", "reason": data["reason"]}
    if LedgerEntry.objects.filter(cause=given["cause"]).exists():
        return None
    about = row or ledger.account_for(data["user"])
    until = {"expires_at": clock.now() + timedelta(days=data["days"])} if data.get("days") else {}
    move(about.pk, data["amount"], staff=request.user, **given, **until)
    return Did(about, f"{done} {money.to_text(data['amount'])}: {data['reason']}")


@staff_action("credits.grant_credits", label="Grant credits", form=GrantForm, icon="add_card")
def grant(request: HttpRequest, account: Account | None, data: dict[str, Any]) -> Did | None:
    """The credits can be spent at once."""
    return once(request, account, data, "Granted", ledger.grant)


@staff_action("credits.adjust_credits", label="Adjust account", form=AdjustForm, icon="balance")
def adjust(request: HttpRequest, account: Account, data: dict[str, Any]) -> Did | None:
    """The correction stays in the ledger permanently, with your name and the reason."""
    return once(request, account, data, "Adjusted by", ledger.adjust)


@staff_action("credits.refund_credits", form=RefundForm, icon="undo", offered=lambda entry: entry.is_charge)
def refund(request: HttpRequest, entry: LedgerEntry, data: dict[str, Any]) -> Did | None:
    """The credits return to the account and can be spent at once."""
    return once(request, entry, data, "Refunded", ledger.refund)


ROWS = base.list_column("ledger", "Ledger", "credits_ledgerentry?account__user__id__exact")


@admin.register(Account)
class AccountAdmin(base.ReadOnly, WithActions):
    empty_text = "An account appears with a user."
    balance_credits = base.credits_column("balance", "balance (credits)")
    held_credits = base.credits_column("held", "held (credits)")
    available_credits = base.credits_column("available", "available (credits)")
    list_display = ("user", "balance_credits", "held_credits", "available_credits", "updated_at", ROWS)
    fields = ("user", "balance_credits", "held_credits", "available_credits", ROWS, "created_at", "updated_at")
    search_help_text = "A user's name, e-mail address or id"
    staff_actions = (grant, replace(grant, name="grant_to", about="none", form=NamedGrantForm), adjust)


class HoldsFilter(admin.SimpleListFilter):
    """By default, settled holds and the releases that belong to a charge are hidden: the charge includes them."""

    title, parameter_name = "holds", "holds"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        # A row that is searched for is always shown.
        named = any(word.startswith("led_") for word in request.GET.get(SEARCH_VAR, "").split())
        self.as_asked = named or any(name.startswith("type__") for name in request.GET)
        return [("all", "Rows of their own")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[LedgerEntry]) -> QuerySet[LedgerEntry]:
        return queryset if self.value() == "all" or self.as_asked else queryset.filter(statement.folded())


class Statement(ChangeList):
    """A page of the ledger whose rows have ``approved_at``, and ``balance``, the balance after the row."""

    result_list: Any

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        rows: list[Any] = list(self.result_list)
        self.result_list = rows
        approved, balances = statement.approvals(rows), statement.balances_after(rows)
        for entry in rows:
            entry.approved_at, entry.balance = approved.get(entry.invocation_id), balances.get(entry.pk)


@admin.register(LedgerEntry)
class LedgerEntryAdmin(base.ReadOnly, WithActions):
    empty_text = "A row appears with each grant, charge and refund."
    list_display = ("id", "created_at", base.user_column("account.user"), "what", "change", "balance_after", "kind")
    about = (("id", "account"), ("type", "change"), "hold", "what", ("against", "cause"))
    fields = (*about, ("reason", "staff"), "reference", ("expires_at", "created_at"))
    list_filter = ("type", HoldsFilter)
    search_help_text = "Entry, run, tool call or user"
    list_select_related = ("account__user", "against", "staff")
    url_lookups = ("account__user__id__exact",)
    user_field = "account"
    id_fields = {"run": "run_id"}
    balance_after = base.column(
        "Balance after", lambda entry: "–" if entry.balance is None else base.amount(entry.balance)
    )
    kind = base.column("type", attrgetter("type"), label={entry.value: entry.tone for entry in EntryType})
    staff_actions = (refund,)

    def find(self, word: str) -> Q:
        if word.startswith("inv_"):
            # The hold, its settlements and the refunds. There is an index by run, and none by call.
            held = ledger.hold_of(word)
            return Q(run_id=held.run_id, invocation_id=word) if held else base.NOTHING
        return super().find(word)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return Statement

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        entry: Any = super().get_object(request, object_id, from_field)
        if entry is not None:
            entry.approved_at = statement.approvals([entry]).get(entry.invocation_id)
        return entry

    def what(self, entry: Any) -> str:
        """The sentence, with links to what the row is about."""
        about = [("run", entry.run_id), ("call", entry.invocation_id), ("chat", entry.chat_id)]
        if entry.type in (*CORRECTIONS, EntryType.ADJUSTMENT):  # an adjustment against a grant is its revocation
            about.append(("charge" if entry.type == EntryType.REFUND else "grant", entry.against_id))
        links = [(base.page_of(model, key), label) for label, key in about if key and (model := base.model_of(key))]
        return format_html(
            '{}<span class="staff-about">{}</span>',
            statement.sentence(entry, entry.approved_at),
            format_html_join(" · ", '<a href="{}">{}</a>', links),
        )

    @admin.display(description="credits")
    def change(self, entry: LedgerEntry) -> str:
        moved = statement.effect(entry)
        tone = "plus" if moved > 0 else "minus" if moved < 0 else "none"
        return format_html(
            '<span class="staff-sum {}" title="{}">{}</span>', tone, money.to_text(moved), statement.signed(moved)
        )

    def hold(self, entry: LedgerEntry) -> str:
        """The hold that the row settled, if it was not charged in full."""
        if not entry.is_charge or entry.against is None or entry.against.amount == entry.amount:
            return "–"
        rest = money.to_text(entry.against.amount - entry.amount)
        return f"{money.to_text(entry.against.amount)} held, {rest} available again"
