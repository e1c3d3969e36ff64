"""The authenticators of the public surface and of server keys."""

from __future__ import annotations

import logging
import re
from typing import Any

from django.db import DatabaseError
from rest_framework.exceptions import AuthenticationFailed

from apikeys import keys
from apikeys.models import ApiKey, ServerKey
from config.api.authentication import BearerAuthentication

logger = logging.getLogger(__name__)


class ApiKeyAuthentication(BearerAuthentication):
    """``request.auth`` is the ApiKey, with its ``scopes``. One query, and a write of ``last_used_at`` once a minute."""

    shape = re.compile(f"{keys.MARK}.*")
    token_name, path = "an API key", "/api/public/v1"
    scheme, bearer_format = "apiKey", "awk_…"
    description = "An API key of `/api/public/v1`, with the scopes that operations name."

    def authenticate_token(self, token: str) -> tuple[Any, ApiKey]:
        key = keys.find_key(token)
        if key is None:
            raise AuthenticationFailed("The API key is not valid.")
        if not keys.is_live(key):
            raise AuthenticationFailed("The API key has expired or was revoked.")
        if key.user.is_active:
            try:
                keys.note_use(key)
            except DatabaseError as error:  # a busy database must not refuse a valid key
                logger.warning("last_used_at of %s was not written (%s)", key.pk, type(error).__name__)
        return key.user, key


class ServerKeyAuthentication(BearerAuthentication):
    """``request.user`` and ``request.auth`` are the ServerKey: the caller is no user."""

    shape = re.compile(f"{keys.SERVER_MARK}.*")
    token_name, path = "a server key", "/api/v1/session-tokens or /api/v1/users/{userId}/credits"
    scheme, bearer_format = "serverKey", "aws_…"
    description = "A server key, which staff create for a trusted backend, with the scopes that operations name."

    def authenticate_token(self, token: str) -> tuple[ServerKey, ServerKey]:
        key = keys.find_key(token, ServerKey)
        if key is None:
            raise AuthenticationFailed("The server key is not valid.")
        if not key.is_active:
            raise AuthenticationFailed("The server key was revoked.")
        keys.note_use(key)
        return key, key
