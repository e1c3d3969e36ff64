"""API keys: users create and revoke them on the session surface; on the public surface a key reads its description."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from apikeys import keys
from apikeys.models import ApiKey
from apikeys.serializers import ApiKeyInputSerializer, ApiKeySerializer, CreatedApiKeySerializer, OwnKeySerializer
from config.api.viewsets import ServiceViewSet


class ApiKeyViewSet(ServiceViewSet):
    serializer_class = ApiKeySerializer
    lookup_url_kwarg = "keyId"
    secret_actions = frozenset({"create"})

    def queryset_for(self, user: Any) -> QuerySet[ApiKey]:
        return ApiKey.objects.filter(user=user)

    @extend_schema(request=ApiKeyInputSerializer, responses={201: CreatedApiKeySerializer})
    def create(self, request: Request) -> Response:
        """Make an API key with the default scopes. This answer alone shows its secret."""
        body = self.read(ApiKeyInputSerializer)
        key, secret = keys.create_key(request.user, name=body["name"], days=body.get("expiration_days"))
        return Response(ApiKeySerializer(key).data | {"secret": secret}, status=201)

    def list(self, request: Request) -> HttpResponseBase:
        """The caller's API keys, never their secrets."""
        return super().list(request)

    def destroy(self, request: Request, keyId: str) -> Response:
        """Revoke an API key, at once and for good."""
        keys.revoke_key(self.get_object())
        return Response(status=204)


class OwnKeyViewSet(ServiceViewSet):
    surface = "public"
    serializer_class = OwnKeySerializer
    required_scopes = {"retrieve": ""}

    @extend_schema(responses=OwnKeySerializer)
    def retrieve(self, request: Request) -> Response:
        """The API key that this request bears."""
        return self.show(request.auth)
