"""Authentication: the bearer token, which both surfaces use, and the session surface's authenticator."""

import contextlib
import hashlib
import re
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import DEFAULT_DB_ALIAS
from django.db.models import F, Model, QuerySet
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from config.api.models import ErasedSubject
from config.database.queries import CompiledQuery

M = TypeVar("M", bound=Model)
# The characters of RFC 6750. Two Authorization headers arrive joined by a comma, so they never match.
_BEARER = re.compile(r"bearer +([A-Za-z0-9\-._~+/]+=*) *", re.IGNORECASE)
USERNAME_MAX = 150
EMAIL_MAX = 254
DIGESTED = "sub-"
# How credentials begin, and the message for a caller who uses one in the wrong place.
KINDS = {
    "awk_": "This is an API key: it is for /api/public/v1.",
    "aws_": "This is a server key: it is for session tokens and the credits of users alone.",
    "eyJ": "This is a session token: it is for a user's own requests to /api/v1.",
}
# The user of the address that `make run` prints.
DEMO_USER = "demo"


class BearerAuthentication(BaseAuthentication):
    """``Authorization: Bearer …``. A subclass finds the token's user, and has a key of KINDS and a name in OpenAPI."""

    mark: ClassVar[str]
    scheme: ClassVar[str]

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"

    def authenticate(self, request: Request) -> tuple[Any, Any]:
        header = request.META.get("HTTP_AUTHORIZATION")
        if not header:
            raise AuthenticationFailed("A bearer token is required.")
        match = _BEARER.fullmatch(header)
        if match is None:
            raise AuthenticationFailed("The Authorization header must be: Bearer, a space, one token.")
        try:
            user, auth = self.authenticate_token(match[1])
        except AuthenticationFailed:
            for mark, hint in KINDS.items():
                if match[1].startswith(mark) and mark != self.mark:
                    raise AuthenticationFailed(hint) from None
            raise
        if not user.is_active:
            raise AuthenticationFailed("This account is not active.")
        return user, auth

    def authenticate_token(self, token: str) -> tuple[Any, Any]:
        """The token's user, and the value of ``request.auth``. Raises AuthenticationFailed."""
        raise NotImplementedError


class SessionTokenAuthentication(BearerAuthentication):
    """The session surface: ``request.auth`` is the token's claims. ``find_user`` reads a user by its name."""

    mark, scheme = "eyJ", "sessionToken"

    def __init__(self, find_user: Callable[[str], Any] | None = None) -> None:
        self.find_user = find_user or user_named.first

    def authenticate_token(self, token: str) -> tuple[Any, dict[str, Any]]:
        from config.api import session_tokens  # imports PyJWT and cryptography, which most commands do not need

        claims = session_tokens.verify(token)
        return user_of(claims, self.find_user), claims


# The columns of a user that requests read, in the model's order, which ``from_db`` needs.
USER_FIELDS = ("id", "is_superuser", "username", "email", "is_staff", "is_active", "date_joined")
user_named: CompiledQuery[Any] = CompiledQuery(
    lambda username: get_user_model()._default_manager.only(*USER_FIELDS).filter(username=username), str
)


class WithUser(Generic[M]):
    """Reads a row together with its user, by the user's name: one round trip for a request about one row."""

    def __init__(self, build: Callable[..., QuerySet[M]], *kinds: type[int] | type[str]) -> None:
        columns = {f"user_{name}": F(f"user__{name}") for name in USER_FIELDS[1:]}
        self.query = CompiledQuery(
            lambda username, *key: build(*key).filter(user__username=username).annotate(**columns), str, *kinds
        )

    def first(self, username: str, *key: int | str) -> M | None:
        row = self.query.first(username, *key)
        if row is not None:
            values = [vars(row)[f"user_{name}"] for name in USER_FIELDS]
            row.user = get_user_model().from_db(DEFAULT_DB_ALIAS, USER_FIELDS, values)
        return row


def user_of(claims: dict[str, Any], find_user: Callable[[str], Any] = user_named.first) -> Any:
    """The user of verified claims. The first request creates the user. A new e-mail address is stored."""
    users = get_user_model()._default_manager
    username = username_of(claims["sub"])
    email = email_of(claims.get("email"))
    user = find_user(username)
    # A token that is older than its user may be from before an erasure.
    if "iat" in claims and (user is None or int(claims["iat"]) < int(user.date_joined.timestamp())):
        erased = ErasedSubject.objects.filter(pk=ErasedSubject.digest_of(username)).first()
        if erased is not None and int(claims["iat"]) <= int(erased.erased_at.timestamp()):
            raise AuthenticationFailed("The user of this session token was erased.")
    if user is None:
        # One of several concurrent requests creates the row, the others read it.
        new = {"email": email or "", "password": make_password(None)}
        user, _ = users.get_or_create(username=username, defaults=new)
    elif user.is_staff or user.is_superuser:
        # An identity provider must not be able to choose a name of staff.
        raise AuthenticationFailed("A session token cannot stand for a staff account.")
    elif email and user.email != email and user.is_active:
        users.filter(pk=user.pk).update(email=email)
        user.email = email
    return user


def username_of(subject: str) -> str:
    """The subject itself if it can be a username, otherwise a digest of it: a provider may use any text. A subject that
    looks like a digest is digested, too, so that no two subjects become one user.
    """
    usable = len(subject) <= USERNAME_MAX and subject.isprintable() and subject == subject.strip()
    if usable and not subject.startswith(DIGESTED):
        return subject
    return f"{DIGESTED}{hashlib.sha256(subject.encode('utf-8', 'surrogatepass')).hexdigest()}"


def email_of(claim: Any) -> str | None:
    with contextlib.suppress(ValidationError):
        if isinstance(claim, str) and len(claim) <= EMAIL_MAX:
            validate_email(claim)
            return claim
    return None
