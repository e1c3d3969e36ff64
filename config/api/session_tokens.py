"""Session tokens: JWTs of an OIDC identity provider or, in the embedded default, of the service itself.

``mint`` and ``verify`` do not read users or requests; ``config.api.authentication`` does.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jwt
import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from django.conf import settings

from config.kernel.errors import Unavailable

logger = logging.getLogger(__name__)

ALGORITHMS = ["RS256", "ES256", "EdDSA"]
REQUIRED_CLAIMS = ["exp", "iat", "sub", "iss", "aud"]
LOCAL_ISSUER = "urn:agent-workflow-service:local"
LOCAL_AUDIENCE = "agent-workflow-service"
REMEMBERED_SECONDS = 30.0
TOKEN_MAX_CHARS = 16 * 1024
JWKS_MAX_BYTES = 1024 * 1024
# Without any key, a provider that did not answer is asked again after this time; all callers are refused meanwhile.
COLD_RETRY_SECONDS = 2.0


class InvalidToken(Exception):
    """The token is not valid, or not valid any more. The message is for people."""


def mint(username: str, hours: float = 12) -> str:
    """A token of the local issuer for ``username``."""
    now = int(time.time())
    claims = {"iss": LOCAL_ISSUER, "aud": LOCAL_AUDIENCE, "sub": username, "iat": now, "exp": now + round(hours * 3600)}
    return jwt.encode(claims, _local_key(), algorithm="EdDSA")


def verify(token: str) -> dict[str, Any]:
    """The claims of a valid token. Raises InvalidToken; Unavailable without the provider's keys.

    Each process checks a token's signature once in REMEMBERED_SECONDS, and its expiry each time.
    """
    if len(token) > TOKEN_MAX_CHARS:
        raise InvalidToken("The session token is too long.")
    try:
        header = _header(token.partition(".")[0])
        algorithm = header.get("alg")
        # Checked before a key is looked up. Afterwards the type of the key determines the algorithm, not the token.
        if algorithm not in ALGORITHMS:
            raise InvalidToken("The session token's algorithm is not accepted.")
        if settings.SESSION_ISSUER:
            jwk = jwks(settings.SESSION_JWKS_URL).key_for(header.get("kid"))
            if jwk.algorithm_name != algorithm:
                raise InvalidToken("The session token's algorithm is not that of its key.")
            signer = Signer(jwk.key, algorithm, settings.SESSION_ISSUER, settings.SESSION_AUDIENCE)
        else:
            if algorithm != "EdDSA":
                raise InvalidToken("The session token's algorithm is not accepted.")
            signer = Signer(_local_public_key(_local_key()), algorithm, LOCAL_ISSUER, LOCAL_AUDIENCE)
        claims = _checked(token, signer, int(time.monotonic() / REMEMBERED_SECONDS))
        if claims["exp"] <= time.time() - settings.SESSION_LEEWAY_SECONDS:
            raise jwt.ExpiredSignatureError
    except jwt.ExpiredSignatureError:
        raise InvalidToken("The session token has expired.") from None
    # Besides PyJWT's own errors: those of its JSON and number parsing, for tokens made to break it.
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidToken("The session token is not valid.") from None
    if not isinstance(claims["sub"], str) or not claims["sub"]:
        raise InvalidToken("The session token names no subject.")
    return claims


@lru_cache(maxsize=64)
def _header(segment: str) -> dict[str, Any]:
    """A token's header, which is the same for all tokens of one key. Not verified."""
    header: dict[str, Any] = jwt.get_unverified_header(f"{segment}.e30.")
    return header


@dataclass(frozen=True)
class Signer:
    """The key, algorithm, issuer and audience that a token must have."""

    key: Any = field(hash=False)
    algorithm: str
    issuer: str
    audience: str


@lru_cache(maxsize=4096)
def _checked(token: str, signer: Signer, period: int) -> dict[str, Any]:
    """The claims of a token with a valid signature. Errors are not cached, and nothing is cached beyond ``period``."""
    claims: dict[str, Any] = jwt.decode(
        token,
        signer.key,
        algorithms=[signer.algorithm],
        issuer=signer.issuer,
        audience=signer.audience,
        leeway=settings.SESSION_LEEWAY_SECONDS,
        options={"require": REQUIRED_CLAIMS},
    )
    return claims


def _local_key() -> Ed25519PrivateKey:
    return _load_local_key(settings.SESSION_KEY)


@lru_cache(maxsize=4)
def _load_local_key(pem: str) -> Ed25519PrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise RuntimeError("session_key.pem in VAR_DIR does not hold an Ed25519 key. Remove it to get a new one.")
    return key


@lru_cache(maxsize=4)
def _local_public_key(key: Ed25519PrivateKey) -> Ed25519PublicKey:
    return key.public_key()


class Jwks:
    """A provider's signing keys, cached. Threads share it; at most one of them fetches at a time.

    The cache is fetched again when it is SESSION_JWKS_CACHE_SECONDS old, so that a key that the provider withdrew is no
    longer accepted. An unknown ``kid`` causes a fetch at once, but not within SESSION_JWKS_REFETCH_SECONDS of the last
    one: anyone can send tokens with invented kids. While the provider is not available, cached keys stay valid.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str | None, jwt.PyJWK] = {}
        self.fetched_at = self.tried_at = float("-inf")
        self.fetching = threading.Lock()

    def key_for(self, kid: str | None) -> jwt.PyJWK:
        """The key with this id. Raises InvalidToken if it is unknown, Unavailable while there are no keys at all."""
        found = self._find(kid)
        if found is None:
            with self.fetching:
                found = self._find(kid)  # another thread may have fetched it meanwhile
                if found is None:
                    self._fetch()
                    found = self._find(kid)
        elif time.monotonic() - self.fetched_at > settings.SESSION_JWKS_CACHE_SECONDS:
            # One thread fetches, the others use the cached keys.
            if self.fetching.acquire(blocking=False):
                try:
                    self._fetch()
                finally:
                    self.fetching.release()
            found = self._find(kid)
        if found is not None:
            return found
        if not self.keys:
            raise Unavailable("The identity provider's keys are not available at the moment; try again.")
        raise InvalidToken("The session token's key is not known.")

    def _find(self, kid: str | None) -> jwt.PyJWK | None:
        keys = self.keys
        if kid is None and len(keys) == 1:  # a provider with one key need not name it
            return next(iter(keys.values()))
        return keys.get(kid)

    def _fetch(self) -> None:
        now = time.monotonic()
        if now - self.tried_at <= (settings.SESSION_JWKS_REFETCH_SECONDS if self.keys else COLD_RETRY_SECONDS):
            return
        self.tried_at = now
        try:
            document = fetch_json(self.url, settings.SESSION_JWKS_TIMEOUT_SECONDS)
            keys = {
                key.key_id: key
                for key in jwt.PyJWKSet.from_dict(document).keys
                if key.algorithm_name in ALGORITHMS and key.public_key_use in (None, "sig")
            }
        except (requests.RequestException, jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
            logger.warning("no keys from %s (%s); cached keys stay valid", self.url, type(error).__name__)
            return
        if keys:
            self.keys, self.fetched_at = keys, now


def fetch_json(url: str, timeout: float) -> Any:
    """GET ``url``: at most JWKS_MAX_BYTES, in ``timeout`` seconds in all except for headers that arrive slowly."""
    deadline = time.monotonic() + timeout
    with requests.get(url, timeout=timeout, stream=True, headers={"Accept": "application/json"}) as response:
        response.raise_for_status()
        content = b""
        for part in response.iter_content(16 * 1024):
            content += part
            if len(content) > JWKS_MAX_BYTES or time.monotonic() > deadline:
                raise requests.RequestException("too much or too slow")
    return json.loads(content)


@lru_cache(maxsize=4)
def jwks(url: str) -> Jwks:
    return Jwks(url)
