"""The code in the address that ``make run`` prints: it signs in to the playground in the embedded default only.

A code is signed and not stored. It is good for session tokens of DEMO_USER until it expires, and so are they.
"""

from __future__ import annotations

import time

from django.conf import settings
from django.core import signing

DEMO_USER = "demo"
VALID_SECONDS = 12 * 3600


def make_code() -> str:
    return signing.Signer(salt=__name__).sign(f"{DEMO_USER}:{int(time.time()) + VALID_SECONDS}")


def exchange(code: str) -> str | None:
    """A session token; None if the code is not valid, or outside the embedded default."""
    if not settings.EMBEDDED or settings.SESSION_ISSUER:
        return None
    try:
        name, _, expiry = signing.Signer(salt=__name__).unsign(code).partition(":")
        remaining = int(expiry) - time.time()
    except (signing.BadSignature, ValueError):
        return None
    if remaining <= 0:
        return None
    from config.api.session_tokens import mint  # PyJWT and cryptography, which most commands do not need

    return mint(name, remaining / 3600)
