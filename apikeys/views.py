"""API keys, which users create and revoke; what a key reads of itself; session tokens, which a server key makes."""

import logging
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from apikeys import keys, serializers
from apikeys.models import SESSION_TOKENS, ApiKey
from config.api.authentication import username_of
from config.api.viewsets import ServiceViewSet
from config.kernel import clock
from config.kernel.errors import Conflict, ValidationFailed

logger = logging.getLogger(__name__)


class ApiKeyViewSet(ServiceViewSet):
    serializer_class = serializers.ApiKeySerializer
    lookup_url_kwarg = "keyId"
    secret_actions = frozenset({"create"})

    def queryset_for(self, user: Any) -> QuerySet[ApiKey]:
        return ApiKey.objects.filter(user=user)

    @extend_schema(request=serializers.ApiKeyInputSerializer, responses={201: serializers.CreatedApiKeySerializer})
    def create(self, request: Request) -> Response:
        """Make an API key with the default scopes. This answer alone shows its secret."""
        key, secret = keys.create_key(request.user, **self.read(serializers.ApiKeyInputSerializer))
        return Response(serializers.ApiKeySerializer(key).data | {"secret": secret}, status=201)

    def destroy(self, request: Request, keyId: str) -> Response:
        """Revoke an API key, at once and for good."""
        keys.revoke_key(self.get_object())
        return Response(status=204)


class OwnKeyViewSet(ServiceViewSet):
    surface = "public"
    serializer_class = serializers.OwnKeySerializer
    required_scopes = {"retrieve": ""}

    def retrieve(self, request: Request) -> Response:
        """The API key that this request bears."""
        return self.show(request.auth)


class SessionTokenViewSet(ServiceViewSet):
    """The caller is a server key. Nothing is stored, so an ``Idempotency-Key`` has no effect."""

    serializer_class = serializers.SessionTokenSerializer
    surface = "server"
    server_scope = SESSION_TOKENS
    idempotent_actions = frozenset()
    error_statuses = {"create": {409}}

    @extend_schema(request=serializers.SessionTokenInputSerializer)
    def create(self, request: Request) -> Response:
        if settings.SESSION_ISSUER:
            raise Conflict("The identity provider issues the session tokens of this service.")
        from config.api import session_tokens  # PyJWT and cryptography, which most commands do not need

        body = self.read(serializers.SessionTokenInputSerializer)
        user = get_user_model()._default_manager.filter(username=username_of(body["sub"])).first()
        if user is not None and (user.is_staff or user.is_superuser):
            raise ValidationFailed({"sub": ["A session token cannot stand for a staff account."]})
        if user is not None and not user.is_active:
            raise ValidationFailed({"sub": ["This account is not active."]})
        token = session_tokens.mint(body["sub"], body["hours"], email=body.get("email"))
        expires_at = datetime.fromtimestamp(session_tokens.verify(token)["exp"], UTC)
        logger.info("server key %s made a session token for user %s", request.auth.pk, user.pk if user else "(new)")
        return Response({"token": token, "expiresAt": clock.iso(expires_at)}, status=201)
