"""The API representation of credits: amounts are decimal strings."""

from rest_framework import serializers

from config.api.serializers import CamelSerializer, CreditsTextField, TimestampField
from credits.models import EntryType


class AccountSerializer(CamelSerializer):
    balance = CreditsTextField()
    held = CreditsTextField()
    available = CreditsTextField()


class LedgerEntrySerializer(CamelSerializer):
    id = serializers.CharField()
    type = serializers.ChoiceField(choices=EntryType.choices)
    amount = CreditsTextField()
    tool_key = serializers.CharField(allow_null=True)
    chat_id = serializers.CharField(allow_null=True)
    run_id = serializers.CharField(allow_null=True)
    invocation_id = serializers.CharField(allow_null=True)
    reason = serializers.CharField()
    created_at = TimestampField()


class UsageGroupSerializer(CamelSerializer):
    tool_key = serializers.CharField()
    display_name = serializers.CharField()
    total_debited = CreditsTextField()
    records = serializers.IntegerField()
    latest_usage_at = TimestampField()


class UsageSummarySerializer(CamelSerializer):
    groups = UsageGroupSerializer(many=True)
    total_debited_all = CreditsTextField()
    records_all = serializers.IntegerField()
    categories_count = serializers.IntegerField()
    period_start = TimestampField()
    period_end = TimestampField()


class ChatUsageSerializer(CamelSerializer):
    chat_id = serializers.CharField()
    chat_title = serializers.CharField(allow_null=True)
    amount = CreditsTextField()
    timestamp = TimestampField()


class UsageByChatSerializer(CamelSerializer):
    entries = ChatUsageSerializer(many=True)


class RunUsageSerializer(CamelSerializer):
    run_id = serializers.CharField()
    tool_name = serializers.CharField(allow_null=True)
    amount = CreditsTextField()
    timestamp = TimestampField()


class CreditChatRunsSerializer(CamelSerializer):
    chat_title = serializers.CharField(allow_null=True)
    items = RunUsageSerializer(many=True)


class DayUsageSerializer(CamelSerializer):
    date = serializers.DateField()
    total_debited = CreditsTextField()
    records = serializers.IntegerField()


class UsageByDaySerializer(CamelSerializer):
    days = DayUsageSerializer(many=True)
