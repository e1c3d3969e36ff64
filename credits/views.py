"""The caller's own credits: account, ledger and usage reports."""

import logging
from functools import cached_property
from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase, StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request
from rest_framework.response import Response

from config.api.authentication import user_named, user_of
from config.api.negotiation import ExactJSONRenderer
from config.api.viewsets import ServiceViewSet, find
from config.kernel.errors import NotFound
from config.kernel.ids import is_plausible_id
from credits import grants, ledger, serializers, usage
from credits.models import EntryType, LedgerEntry

logger = logging.getLogger(__name__)
SUBJECT_MAX = 255  # The longest subject that OpenID Connect allows.
REPLAYED = {"Idempotent-Replayed": "true"}

PERIOD = OpenApiParameter(
    "period", enum=list(usage.PERIODS), default=usage.DEFAULT_PERIOD, description="A rolling window that ends now."
)


class CreditsViewSet(ServiceViewSet):
    """The credits of the caller or, for a server key, of the user that the path names."""

    tag = "credits"

    @cached_property
    def owner_id(self) -> int:
        if self.surface != "server":
            return self.request.user.pk or 0
        subject = self.kwargs["userId"]
        # A text that cannot be an id belongs to nobody, as in all path parameters. Staff accounts are not offered here.
        if len(subject) > SUBJECT_MAX or "\0" in subject:
            raise NotFound
        try:
            # Events and TOP_UP_URL show the username, which can differ from the subject: both are accepted.
            user = user_of({"sub": subject}, lambda username: user_named.first(subject) or user_named.first(username))
        except AuthenticationFailed:
            raise NotFound from None
        key: Any = self.request.auth
        logger.info("server key %s: %s of the credits of user %s", key.pk, self.action, user.pk)
        return user.pk


class AccountViewSet(CreditsViewSet):
    serializer_class = serializers.AccountSerializer
    required_scopes = {"retrieve": "credits:read"}

    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Balance, open holds, what is available, and what will expire."""
        account: Any = ledger.account_for(self.owner_id)
        account.expiring = grants.expiring(account.pk)
        return self.show(account)


class LedgerViewSet(CreditsViewSet):
    serializer_class = serializers.LedgerEntrySerializer
    renderer_classes = [ExactJSONRenderer, serializers.CsvRenderer]

    def queryset_for(self, user: Any) -> QuerySet[LedgerEntry]:
        return LedgerEntry.objects.filter(account_id=self.owner_id) if user else LedgerEntry.objects.none()

    @extend_schema(
        responses={
            (200, "application/json"): serializers.LedgerEntrySerializer(many=True),
            (200, "text/csv"): OpenApiResponse(OpenApiTypes.STR, description="Every row, newest first."),
        }
    )
    def list(self, request: Request, **kwargs: Any) -> HttpResponseBase:
        """The ledger, newest first; with `Accept: text/csv` all of it as one file."""
        if request.accepted_renderer.format == serializers.CsvRenderer.format:
            parts = serializers.csv_parts(usage.export(self.owner_id))
            headers = {"Content-Disposition": 'attachment; filename="ledger.csv"', "Cache-Control": "no-store"}
            return StreamingHttpResponse(parts, content_type="text/csv; charset=utf-8", headers=headers)
        # The list makes the generator set the balance of each row.
        return self.page(self.get_queryset(), prepare=lambda rows: list(grants.with_balances(rows)))


class GrantViewSet(CreditsViewSet):
    """For server keys. The reference makes a call repeatable for ever, an ``Idempotency-Key`` for a day."""

    serializer_class = serializers.LedgerEntrySerializer
    idempotent_actions = frozenset({"create", "revoke"})
    error_statuses = {"create": {409}}

    def keys_of(self, request: Request) -> int:
        return self.owner_id

    @extend_schema(
        request=serializers.GrantInputSerializer,
        responses={200: serializers.LedgerEntrySerializer, 201: serializers.LedgerEntrySerializer},
    )
    def create(self, request: Request, userId: str) -> Response:
        entry, repeated = grants.grant(self.owner_id, **self.read(serializers.GrantInputSerializer))
        shown = self.get_serializer(entry).data
        return Response(shown, 200, headers=REPLAYED) if repeated else Response(shown, 201)

    @extend_schema(request=serializers.RevokeInputSerializer, responses=serializers.RevokedSerializer)
    def revoke(self, request: Request, userId: str, ledgerId: str) -> Response:
        given = find(LedgerEntry.objects.filter(account_id=self.owner_id, type=EntryType.GRANT), ledgerId)
        answer, repeated = grants.revoke(given, **self.read(serializers.RevokeInputSerializer))
        return Response(answer, headers=REPLAYED if repeated else None)


class UsageViewSet(CreditsViewSet):
    serializer_class = serializers.UsageSummarySerializer
    error_statuses = {"of_chat": {-404}}
    query_parameters = {"summary": [PERIOD], "by_chat": [PERIOD], "by_day": [PERIOD]}

    def summary(self, request: Request, **kwargs: Any) -> Response:
        """Usage by tool."""
        return self.show(usage.summary(self.owner_id, self.period()))

    @extend_schema(responses=serializers.UsageByChatSerializer)
    def by_chat(self, request: Request) -> Response:
        """Usage by chat, every tool and bare model usage combined."""
        entries = usage.by_chat(self.owner_id, self.period())
        return Response(serializers.UsageByChatSerializer({"entries": entries}).data)

    @extend_schema(responses=serializers.UsageByDaySerializer)
    def by_day(self, request: Request) -> Response:
        """Usage by UTC day."""
        return Response(serializers.UsageByDaySerializer({"days": usage.by_day(self.owner_id, self.period())}).data)

    @extend_schema(responses=serializers.CreditChatRunsSerializer)
    def of_chat(self, request: Request, chatId: str) -> Response:
        """A chat's usage by tool and run; empty for a chat that is not the caller's."""
        title, items = usage.of_chat(self.owner_id, chatId) if is_plausible_id(chatId) else (None, [])
        return Response(serializers.CreditChatRunsSerializer({"chat_title": title, "items": items}).data)

    def period(self) -> usage.Period:
        return usage.period_of(self.request.query_params.get("period", usage.DEFAULT_PERIOD))
