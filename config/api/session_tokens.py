"""Session tokens: JWTs of an OIDC identity provider or, in the embedded default, of the service itself. Users and
requests are read in ``config.api.authentication``.
"""

import json
import logging
import threading
import time
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from jwt.algorithms import OKPAlgorithm
from rest_framework.exceptions import AuthenticationFailed

from config.kernel.errors import Unavailable
from config.outbound import client
from config.outbound.loop import shared

# For fetching keys: the time limit, the pause between fetches for unknown keys, and the age of keys to fetch again.
SESSION_JWKS_TIMEOUT_SECONDS = 3.0
SESSION_JWKS_REFETCH_SECONDS = 60
SESSION_JWKS_CACHE_SECONDS = 3600

logger = logging.getLogger(__name__)

ALGORITHMS = ["RS256", "ES256", "EdDSA"]
REQUIRED_CLAIMS = ["exp", "iat", "sub", "iss", "aud"]
LOCAL_ISSUER = "urn:agent-workflow-service:local"
LOCAL_AUDIENCE = "agent-workflow-service"
REMEMBERED_SECONDS = 30.0
TOKEN_MAX_CHARS = 16 * 1024
JWKS_MAX_BYTES = 1024 * 1024
# While there is no key at all, the provider is asked again after this time. All callers are refused until it answers.
COLD_RETRY_SECONDS = 2.0


def mint(username: str, hours: float = 12, *, email: str | None = None) -> str:
    """A token of the local issuer for ``username``."""
    now = int(time.time())
    claims = {"iss": LOCAL_ISSUER, "aud": LOCAL_AUDIENCE, "sub": username, "iat": now, "exp": now + round(hours * 3600)}
    if email is not None:
        claims["email"] = email
    return jwt.encode(claims, settings.SESSION_KEY, algorithm="EdDSA")


def verify(token: str) -> dict[str, Any]:
    """The claims of a valid token. Raises AuthenticationFailed; Unavailable without the provider's keys."""
    if len(token) > TOKEN_MAX_CHARS:
        raise AuthenticationFailed("The session token is too long.")
    try:
        header = jwt.get_unverified_header(token)
        # Checked before a key is looked up. After that, the type of the key determines the algorithm, not the token.
        if header.get("alg") not in ALGORITHMS:
            raise AuthenticationFailed("The session token's algorithm is not accepted.")
        if settings.SESSION_ISSUER:
            key = jwks(settings.SESSION_JWKS_URL).key_for(header.get("kid"))
            issuer, audience = settings.SESSION_ISSUER, settings.SESSION_AUDIENCE
        else:
            key, issuer, audience = local_key(settings.SESSION_KEY), LOCAL_ISSUER, LOCAL_AUDIENCE
        if header["alg"] != key.algorithm_name:
            raise AuthenticationFailed("The session token's algorithm is not that of its key.")
        claims = _checked(token, key, issuer, audience, int(time.monotonic() / REMEMBERED_SECONDS))
        if claims["exp"] <= time.time() - settings.SESSION_LEEWAY_SECONDS:
            raise jwt.ExpiredSignatureError
    except jwt.ExpiredSignatureError:
        raise AuthenticationFailed("The session token has expired.") from None
    # Also the errors of PyJWT's JSON and number parsing, for tokens that are made to break it.
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        raise AuthenticationFailed("The session token is not valid.") from None
    if not isinstance(claims["sub"], str) or not claims["sub"]:
        raise AuthenticationFailed("The session token names no subject.")
    return claims


@lru_cache(maxsize=4096)
def _checked(token: str, key: jwt.PyJWK, issuer: str, audience: str, period: int) -> dict[str, Any]:
    """The claims of a token with a valid signature, cached for one ``period`` at most. Errors are not cached."""
    expected: dict[str, Any] = {"issuer": issuer, "audience": audience, "options": {"require": REQUIRED_CLAIMS}}
    return jwt.decode(token, key, [key.algorithm_name], leeway=settings.SESSION_LEEWAY_SECONDS, **expected)


@lru_cache(maxsize=4)
def local_key(pem: str) -> jwt.PyJWK:
    """The public key of the local issuer."""
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise RuntimeError("session_key.pem in VAR_DIR does not hold an Ed25519 key. Remove it to get a new one.")
    return jwt.PyJWK(OKPAlgorithm.to_jwk(key.public_key(), as_dict=True))


class Jwks:
    """A provider's signing keys, cached. Threads share it and wait for the same fetch, on the event loop.

    The keys are fetched again from time to time, so that a withdrawn key is no longer accepted, and for an unknown
    ``kid``, but not again soon: anyone can send invented kids. While the provider is not available, cached keys stay
    valid. Without a key, only the first fetch is waited for: a provider that hangs must not occupy all threads.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str | None, jwt.PyJWK] = {}
        self.fetched_at = self.tried_at = float("-inf")
        self.lock = threading.Lock()
        self.fetching: Future[None] = Future()
        self.fetching.set_result(None)

    def key_for(self, kid: str | None) -> jwt.PyJWK:
        """The key with this id. Raises AuthenticationFailed if it is unknown, Unavailable while there are no keys."""
        found = self._find(kid)
        if found is None or time.monotonic() - self.fetched_at > SESSION_JWKS_CACHE_SECONDS:
            failed = not self.keys and self.tried_at > float("-inf")
            with self.lock:
                pause = SESSION_JWKS_REFETCH_SECONDS if self.keys else COLD_RETRY_SECONDS
                starts = self.fetching.done() and time.monotonic() - self.tried_at > pause
                if starts:
                    client.prepare()
                    self.fetching = shared.submit(self._fetch())
                fetching = self.fetching
            # While one thread waits for newer keys, the others use the cached ones.
            if not failed and (starts or found is None):
                fetching.result()
            found = self._find(kid)
        if found is not None:
            return found
        if not self.keys:
            message = "The identity provider's keys are not available at the moment; try again."
            raise Unavailable(message, headers={"Retry-After": f"{COLD_RETRY_SECONDS:.0f}"})
        raise AuthenticationFailed("The session token's key is not known.")

    def _find(self, kid: str | None) -> jwt.PyJWK | None:
        keys = self.keys
        if kid is None and len(keys) == 1:  # a provider with one key need not name it
            return next(iter(keys.values()))
        return keys.get(kid)

    async def _fetch(self) -> None:
        """Ends within SESSION_JWKS_TIMEOUT_SECONDS and raises nothing that a provider can cause."""
        limits = {"total_timeout": SESSION_JWKS_TIMEOUT_SECONDS, "max_bytes": JWKS_MAX_BYTES}
        headers = {"Accept": "application/json"}
        try:
            answer = await client.asend("GET", self.url, headers=headers, allow_private=True, **limits)
            if answer.status != 200 or answer.truncated:
                raise ValueError
            given = jwt.PyJWKSet.from_dict(json.loads(answer.body)).keys
            usable = [key for key in given if key.algorithm_name in ALGORITHMS and key.public_key_use in (None, "sig")]
            if usable:
                self.keys, self.fetched_at = {key.key_id: key for key in usable}, time.monotonic()
        except Exception as error:  # malformed keys can make the library raise any exception
            logger.warning("no keys from %s (%s); cached keys stay valid", self.url, type(error).__name__)
        finally:
            self.tried_at = time.monotonic()


jwks = lru_cache(maxsize=4)(Jwks)
