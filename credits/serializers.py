"""The API representation of credits: amounts are decimal strings. The ledger also as CSV."""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from io import StringIO
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.api.negotiation import ExactJSONRenderer
from config.api.serializers import CamelSerializer, CreditsTextField, NullableText, StrictCharField, TimestampField
from config.kernel import money
from credits import grants
from credits.models import REFERENCE_MAX_CHARS, EntryType, LedgerEntry

# Rows of a part of the CSV. Each part takes a change of threads, and other requests wait while one is made.
ROWS_AT_ONCE = 25
FREE_TEXT = {"toolKey", "reason", "reference"}
# A spreadsheet would execute text that begins like a formula. Some also accept the full-width signs.
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


class ExpiringSerializer(CamelSerializer):
    amount = CreditsTextField(help_text="What is left of the grants that expire then.")
    at = TimestampField(help_text="When it expires.")


class AccountSerializer(CamelSerializer):
    balance = CreditsTextField(help_text="All credits of the account, held ones included.")
    held = CreditsTextField(help_text="Credits that are reserved for calls in progress.")
    available = CreditsTextField(help_text="Balance minus holds.")
    expiring = ExpiringSerializer(many=True, read_only=True, help_text="What will expire, soonest first.")


class LedgerEntrySerializer(CamelSerializer):
    id = serializers.CharField()
    type = serializers.ChoiceField(choices=EntryType.choices, help_text="What the row does.")
    amount = CreditsTextField(help_text="Credits as decimal text. `type` says what the row does with them.")
    tool_key = NullableText("The name of the tool, or null for usage of models and for rows without a tool.")
    chat_id = NullableText("The chat that caused the row, or null.")
    run_id = NullableText("The run that caused the row, or null.")
    invocation_id = NullableText("The tool invocation that caused the row, or null.")
    reason = serializers.CharField(help_text="Why staff or the app's backend wrote the row; otherwise empty.")
    reference = NullableText("The app's own name of the payment or its refund, or null.")
    expires_at = TimestampField(allow_null=True, help_text="When what is left of the grant expires, or null.")
    created_at = TimestampField()
    balance_after = CreditsTextField(help_text="The balance of the account after the row.")


class CsvRenderer(ExactJSONRenderer):
    """Makes ``Accept: text/csv`` negotiable. The view streams the rows itself; errors remain JSON."""

    media_type = "text/csv"
    format = "csv"


def csv_parts(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    """The ledger as CSV, produced in parts during the response."""
    # One serializer for all rows: a new one for each row would take most of the time, and keep the row in memory.
    text, serializer = StringIO(), LedgerEntrySerializer()
    writer = csv.writer(text)
    writer.writerow(serializer.fields)
    for number, entry in enumerate(grants.with_balances(entries), 1):
        row = serializer.to_representation(entry)
        writer.writerow([no_formula(value) if value and name in FREE_TEXT else value for name, value in row.items()])
        if not number % ROWS_AT_ONCE:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    if rest := text.getvalue():
        yield rest


def no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA_SIGNS) else text


@extend_schema_field({"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$", "examples": ["25"]})
class AmountField(serializers.Field):
    """More than 0 credits as decimal text → micro-credits."""

    def to_internal_value(self, data: Any) -> int:
        try:
            return money.parse(data if isinstance(data, str) else "", minimum=1, field="The amount")
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None


@extend_schema_field({"type": "string", "format": "date-time"})
class ExpiryField(serializers.Field):
    def to_internal_value(self, data: Any) -> datetime:
        try:
            return grants.end_of_grant(data)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None


Reference = partial(StrictCharField, max_length=REFERENCE_MAX_CHARS, trim_whitespace=False)
Reason = partial(StrictCharField, max_length=200)


class GrantInputSerializer(CamelSerializer):
    amount = AmountField(help_text="Credits as decimal text, more than 0.")
    reference = Reference(
        help_text="Your id of the payment. It is unique for ever: the same again grants nothing more."
    )
    reason = Reason(help_text="What the user bought. It is shown in the ledger.")
    expires_at = ExpiryField(allow_null=True, default=None, help_text="When what is left expires. Without it: never.")


class RevokeInputSerializer(CamelSerializer):
    reference = Reference(help_text="Your id of the refund or charge-back. The same again takes nothing more.")
    reason = Reason(help_text="Why. It is shown in the ledger.")
    mode = serializers.ChoiceField(
        choices=[grants.UNSPENT, grants.ALL],
        default=grants.UNSPENT,
        help_text="`unspent` takes what is left of the grant, `all` takes all of it, even below zero.",
    )


class RevokedSerializer(CamelSerializer):
    revoked = CreditsTextField(help_text="What was taken back.")
    balance = CreditsTextField(help_text="The balance of the account after it.")


class UsageGroupSerializer(CamelSerializer):
    tool_key = serializers.CharField(help_text="The name of the tool, or `model` for usage of models.")
    display_name = serializers.CharField(help_text="The name that people see.")
    total_debited = CreditsTextField(source="amount", help_text="Credits taken in the period, as decimal text.")
    records = serializers.IntegerField(help_text="The number of ledger rows.")
    latest_usage_at = TimestampField(source="latest", help_text="The time of the newest row.")


class UsageSummarySerializer(CamelSerializer):
    groups = UsageGroupSerializer(many=True, help_text="Usage by tool, largest first.")
    total_debited_all = CreditsTextField(help_text="Credits taken in the period by all groups, as decimal text.")
    records_all = serializers.IntegerField(help_text="The number of ledger rows of all groups.")
    categories_count = serializers.IntegerField(help_text="The number of groups.")
    period_start = TimestampField(help_text="Start of the period. For `all`: when the account was created.")
    period_end = TimestampField(help_text="End of the period: now.")


class ChatUsageSerializer(CamelSerializer):
    chat_id = serializers.CharField()
    chat_title = NullableText("The title of the chat, or null.")
    amount = CreditsTextField(help_text="Credits taken minus refunds, as decimal text.")
    timestamp = TimestampField(source="latest", help_text="The time of the newest row.")


class UsageByChatSerializer(CamelSerializer):
    entries = ChatUsageSerializer(many=True, help_text="One entry per chat, newest activity first.")


class RunUsageSerializer(CamelSerializer):
    run_id = serializers.CharField()
    tool_name = NullableText("The name of the tool, or null for usage of models.")
    amount = CreditsTextField(help_text="Credits taken minus refunds, as decimal text.")
    timestamp = TimestampField(source="latest", help_text="The time of the newest row.")


class CreditChatRunsSerializer(CamelSerializer):
    chat_title = NullableText("The title of the chat, or null.")
    items = RunUsageSerializer(many=True, help_text="One item per run and tool, newest activity first.")


class DayUsageSerializer(CamelSerializer):
    date = serializers.DateField(help_text="The day in UTC.")
    total_debited = CreditsTextField(source="amount", help_text="Credits taken on the day, as decimal text.")
    records = serializers.IntegerField(help_text="The number of ledger rows.")


class UsageByDaySerializer(CamelSerializer):
    days = DayUsageSerializer(many=True, help_text="One item per day with usage.")
