"""The API representation of credits: amounts are decimal strings."""

from rest_framework import serializers

from config.api.serializers import CamelSerializer, CreditsTextField, TimestampField
from credits.models import EntryType


class AccountSerializer(CamelSerializer):
    balance = CreditsTextField(help_text="All credits of the account, held ones included.")
    held = CreditsTextField(help_text="Credits that are reserved for calls in progress.")
    available = CreditsTextField(help_text="Balance minus holds.")


class LedgerEntrySerializer(CamelSerializer):
    id = serializers.CharField()
    type = serializers.ChoiceField(choices=EntryType.choices, help_text="What the row does.")
    amount = CreditsTextField(help_text="Credits as decimal text. `type` says what the row does with them.")
    tool_key = serializers.CharField(
        allow_null=True, help_text="The name of the tool, or null for usage of models and for rows without a tool."
    )
    chat_id = serializers.CharField(allow_null=True, help_text="The chat that caused the row, or null.")
    run_id = serializers.CharField(allow_null=True, help_text="The run that caused the row, or null.")
    invocation_id = serializers.CharField(
        allow_null=True, help_text="The tool invocation that caused the row, or null."
    )
    reason = serializers.CharField(help_text="Why staff wrote the row; otherwise empty.")
    created_at = TimestampField()


class UsageGroupSerializer(CamelSerializer):
    tool_key = serializers.CharField(help_text="The name of the tool, or `model` for usage of models.")
    display_name = serializers.CharField(help_text="The name that people see.")
    total_debited = CreditsTextField(help_text="Credits taken in the period, as decimal text.")
    records = serializers.IntegerField(help_text="The number of ledger rows.")
    latest_usage_at = TimestampField(help_text="The time of the newest row.")


class UsageSummarySerializer(CamelSerializer):
    groups = UsageGroupSerializer(many=True, help_text="Usage by tool, largest first.")
    total_debited_all = CreditsTextField(help_text="Credits taken in the period by all groups, as decimal text.")
    records_all = serializers.IntegerField(help_text="The number of ledger rows of all groups.")
    categories_count = serializers.IntegerField(help_text="The number of groups.")
    period_start = TimestampField(help_text="Start of the period. For `all`: when the account was created.")
    period_end = TimestampField(help_text="End of the period: now.")


class ChatUsageSerializer(CamelSerializer):
    chat_id = serializers.CharField()
    chat_title = serializers.CharField(allow_null=True, help_text="The title of the chat, or null.")
    amount = CreditsTextField(help_text="Credits taken minus refunds, as decimal text.")
    timestamp = TimestampField(help_text="The time of the newest row.")


class UsageByChatSerializer(CamelSerializer):
    entries = ChatUsageSerializer(many=True, help_text="One entry per chat, newest activity first.")


class RunUsageSerializer(CamelSerializer):
    run_id = serializers.CharField()
    tool_name = serializers.CharField(allow_null=True, help_text="The name of the tool, or null for usage of models.")
    amount = CreditsTextField(help_text="Credits taken minus refunds, as decimal text.")
    timestamp = TimestampField(help_text="The time of the newest row.")


class CreditChatRunsSerializer(CamelSerializer):
    chat_title = serializers.CharField(allow_null=True, help_text="The title of the chat, or null.")
    items = RunUsageSerializer(many=True, help_text="One item per run and tool, newest activity first.")


class DayUsageSerializer(CamelSerializer):
    date = serializers.DateField(help_text="The day in UTC.")
    total_debited = CreditsTextField(help_text="Credits taken on the day, as decimal text.")
    records = serializers.IntegerField(help_text="The number of ledger rows.")


class UsageByDaySerializer(CamelSerializer):
    days = DayUsageSerializer(many=True, help_text="One item per day with usage.")
