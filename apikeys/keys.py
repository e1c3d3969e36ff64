"""Creating, finding, authenticating and revoking API keys (docs/resources.md) and server keys (docs/identity.md).

A secret is ``awk_``, or ``aws_`` for a server key, then 43 random base62 characters (256 bits) and a checksum of 6.
Only its SHA-256 is stored: at this entropy a slow hash would add cost but no protection.
"""

import hashlib
import logging
import re
import secrets
import string
import zlib
from collections.abc import Collection
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib.auth import get_user_model
from django.db import DatabaseError, transaction
from django.db.models import Q
from rest_framework.exceptions import AuthenticationFailed

from apikeys.models import SESSION_TOKENS, ApiKey, ServerKey
from config.api.authentication import BearerAuthentication
from config.kernel import clock
from config.kernel.errors import Conflict

logger = logging.getLogger(__name__)

API_KEY_MAX_LIVE = 50  # of a user
API_KEY_DEFAULT_DAYS, API_KEY_MAX_DAYS = 90, 365
# Minimum time between two writes of `lastUsedAt`.
API_KEY_LAST_USED_SECONDS = 60

DEFAULT_SCOPES = (
    *("chats:read", "chats:write", "runs:read", "runs:write", "waitpoints:respond", "attachments:write"),
    "credits:read",
)
MARK, SERVER_MARK = "awk_", "aws_"
BODY_LENGTH = 43
CHECKSUM_LENGTH = 6
PREFIX_LENGTH = 8
ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SHAPE = re.compile(rf"aw[ks]_([0-9A-Za-z]{{{BODY_LENGTH}}})([0-9A-Za-z]{{{CHECKSUM_LENGTH}}})")


@transaction.atomic
def create_key(user: Any, *, name: str, expiration_days: int = API_KEY_DEFAULT_DAYS) -> tuple[ApiKey, str]:
    """A new key and its secret, which is not stored. Raises Conflict at API_KEY_MAX_LIVE live keys."""
    # Without the lock, two concurrent requests would each count one key too few.
    get_user_model()._default_manager.select_for_update(no_key=True).get(pk=user.pk)
    now = clock.now()
    live = ApiKey.objects.filter(user=user, revoked_at=None, expires_at__gt=now).count()
    if live >= API_KEY_MAX_LIVE:
        raise Conflict(f"You have {live} live API keys, which is the maximum; revoke one first.")
    times = {"created_at": now, "expires_at": now + timedelta(days=expiration_days)}
    return _create(ApiKey, MARK, user=user, name=name, scopes=list(DEFAULT_SCOPES), **times)


def create_server_key(name: str, scopes: Collection[str] = (SESSION_TOKENS,)) -> tuple[ServerKey, str]:
    """A new server key and its secret, which is not stored."""
    return _create(ServerKey, SERVER_MARK, name=name, scopes=list(scopes))


def _create(kind: type[Any], mark: str, **fields: Any) -> tuple[Any, str]:
    secret = new_secret(mark)
    return kind._default_manager.create(prefix=secret[:PREFIX_LENGTH], digest=digest(secret), **fields), secret


def find_key(secret: str, kind: type[ApiKey] | type[ServerKey] = ApiKey) -> Any:
    """The key, even if it is no longer live; None if there is none. A malformed secret costs no query."""
    match = _SHAPE.fullmatch(secret)
    if match is None or checksum(match[1]) != match[2]:
        return None
    return kind._default_manager.select_related().filter(digest=digest(secret)).first()


def revoke_key(key: ApiKey | ServerKey) -> bool:
    """Takes effect at once in every process, because none caches keys. False if the key was revoked before."""
    return bool(type(key)._default_manager.filter(pk=key.pk, revoked_at=None).update(revoked_at=clock.now()))


@transaction.atomic
def narrow_key(key: ApiKey, keep: list[str]) -> list[str]:
    """Remove all scopes except ``keep``, at once. Returns the removed ones; none of a revoked key."""
    row = ApiKey.objects.filter(pk=key.pk, revoked_at=None)
    held = row.select_for_update(no_key=True).values_list("scopes", flat=True).first() or []
    row.update(scopes=[scope for scope in held if scope in keep])
    return [scope for scope in held if scope not in keep]


def note_use(key: ApiKey | ServerKey) -> None:
    """Write ``last_used_at``, at most once in API_KEY_LAST_USED_SECONDS."""
    now = clock.now()
    stale = now - timedelta(seconds=API_KEY_LAST_USED_SECONDS)
    if key.last_used_at is None or key.last_used_at <= stale:
        # A guarded update: of many concurrent requests one writes.
        unused = Q(last_used_at=None) | Q(last_used_at__lte=stale)
        type(key)._default_manager.filter(unused, pk=key.pk).update(last_used_at=now)


def new_secret(mark: str = MARK) -> str:
    body = "".join(secrets.choice(ALPHABET) for _ in range(BODY_LENGTH))
    return mark + body + checksum(body)


def checksum(body: str) -> str:
    """CRC-32 in base62: it finds errors of typing and copying and is no protection."""
    number, base = zlib.crc32(body.encode()), len(ALPHABET)
    return "".join(ALPHABET[number // base**place % base] for place in reversed(range(CHECKSUM_LENGTH)))


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class ApiKeyAuthentication(BearerAuthentication):
    """``request.auth`` is the key, with its ``scopes``. One query, and a write of ``last_used_at`` once a minute."""

    kind: ClassVar[type[ApiKey] | type[ServerKey]] = ApiKey
    mark, scheme = MARK, "apiKey"

    def authenticate_token(self, token: str) -> tuple[Any, ApiKey | ServerKey]:
        key = find_key(token, self.kind)
        if key is None:
            raise AuthenticationFailed("The key is not valid.")
        if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= clock.now()):
            raise AuthenticationFailed("The key has expired or was revoked.")
        caller = key.user if isinstance(key, ApiKey) else key
        if caller.is_active:
            try:
                note_use(key)
            except DatabaseError as error:  # a busy database must not refuse a valid key
                logger.warning("last_used_at of %s was not written (%s)", key.pk, type(error).__name__)
        return caller, key


class ServerKeyAuthentication(ApiKeyAuthentication):
    """The caller is no user: ``request.user`` is the key too."""

    kind = ServerKey
    mark, scheme = SERVER_MARK, "serverKey"
