"""The caller's own credits: account, ledger and usage reports."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase, StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from config.api.negotiation import ExactJSONRenderer
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import ValidationFailed
from config.kernel.ids import is_plausible_id
from credits import ledger, usage
from credits.export import CsvRenderer, csv_lines
from credits.models import LedgerEntry
from credits.serializers import (
    AccountSerializer,
    CreditChatRunsSerializer,
    LedgerEntrySerializer,
    UsageByChatSerializer,
    UsageByDaySerializer,
    UsageSummarySerializer,
)

PERIOD = OpenApiParameter(
    "period", enum=list(usage.PERIODS), default=usage.DEFAULT_PERIOD, description="A rolling window that ends now."
)


def caller_id(request: Request) -> int:
    user: Any = request.user
    return user.pk


class AccountViewSet(ServiceViewSet):
    tag = "credits"
    serializer_class = AccountSerializer
    required_scopes = {"retrieve": "credits:read"}

    @extend_schema(responses=AccountSerializer)
    def retrieve(self, request: Request) -> Response:
        """Balance, open holds, and what is available."""
        return self.show(ledger.account_for(caller_id(request)))


class LedgerViewSet(ServiceViewSet):
    tag = "credits"
    serializer_class = LedgerEntrySerializer
    renderer_classes = [ExactJSONRenderer, CsvRenderer]

    def queryset_for(self, user: Any) -> QuerySet[LedgerEntry]:
        return LedgerEntry.objects.filter(account_id=user.pk) if user else LedgerEntry.objects.none()

    @extend_schema(
        responses={
            (200, "application/json"): LedgerEntrySerializer(many=True),
            (200, "text/csv"): OpenApiResponse(OpenApiTypes.STR, description="Every row, newest first."),
        }
    )
    def list(self, request: Request) -> HttpResponseBase:
        """The caller's ledger, newest first; with `Accept: text/csv` all of it as one file."""
        if request.accepted_renderer.format == CsvRenderer.format:
            lines = csv_lines(usage.export(caller_id(request)))
            headers = {"Content-Disposition": 'attachment; filename="ledger.csv"', "Cache-Control": "no-store"}
            return StreamingHttpResponse(lines, content_type="text/csv; charset=utf-8", headers=headers)
        return self.page(self.get_queryset())


class UsageViewSet(ServiceViewSet):
    tag = "credits"
    serializer_class = UsageSummarySerializer
    error_statuses = {"of_chat": {-404}}
    query_parameters = {"summary": [PERIOD], "by_chat": [PERIOD], "by_day": [PERIOD]}

    @extend_schema(responses=UsageSummarySerializer)
    def summary(self, request: Request) -> Response:
        """Usage by tool."""
        return self.show(usage.summary(caller_id(request), self.period()))

    @extend_schema(responses=UsageByChatSerializer)
    def by_chat(self, request: Request) -> Response:
        """Usage by chat, every tool and bare model usage combined."""
        entries = usage.by_chat(caller_id(request), self.period())
        return Response(UsageByChatSerializer({"entries": entries}).data)

    @extend_schema(responses=UsageByDaySerializer)
    def by_day(self, request: Request) -> Response:
        """Usage by UTC day."""
        return Response(UsageByDaySerializer({"days": usage.by_day(caller_id(request), self.period())}).data)

    @extend_schema(responses=CreditChatRunsSerializer)
    def of_chat(self, request: Request, chatId: str) -> Response:
        """A chat's usage by tool and run; empty for a chat that is not the caller's."""
        title, items = usage.of_chat(caller_id(request), chatId) if is_plausible_id(chatId) else (None, [])
        return Response(CreditChatRunsSerializer({"chat_title": title, "items": items}).data)

    def period(self) -> usage.Period:
        name = self.request.query_params.get("period", usage.DEFAULT_PERIOD)
        if name not in usage.PERIODS:
            raise ValidationFailed({"period": [f"Use one of {', '.join(usage.PERIODS)}."]})
        return usage.period_of(name)
