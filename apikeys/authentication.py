"""The authenticators of the public surface and of server keys."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from django.db import DatabaseError
from rest_framework.exceptions import AuthenticationFailed

from apikeys import keys
from apikeys.models import ApiKey, ServerKey
from config.api.authentication import BearerAuthentication

logger = logging.getLogger(__name__)


class ApiKeyAuthentication(BearerAuthentication):
    """``request.auth`` is the key, with its ``scopes``. One query, and a write of ``last_used_at`` once a minute."""

    kind: ClassVar[type[ApiKey] | type[ServerKey]] = ApiKey
    scheme, bearer_format = "apiKey", "awk_…"
    description = "An API key of `/api/public/v1`, with the scopes that operations name."

    def authenticate_token(self, token: str) -> tuple[Any, ApiKey | ServerKey]:
        key = keys.find_key(token, self.kind)
        if key is None:
            raise AuthenticationFailed("The key is not valid.")
        if not key.is_live:
            raise AuthenticationFailed("The key has expired or was revoked.")
        caller = key.user if isinstance(key, ApiKey) else key
        if caller.is_active:
            try:
                keys.note_use(key)
            except DatabaseError as error:  # a busy database must not refuse a valid key
                logger.warning("last_used_at of %s was not written (%s)", key.pk, type(error).__name__)
        return caller, key


class ServerKeyAuthentication(ApiKeyAuthentication):
    """The caller is no user: ``request.user`` is the key too."""

    kind = ServerKey
    scheme, bearer_format = "serverKey", "aws_…"
    description = "A server key, which staff create for a trusted backend, with the scopes that operations name."
