"""Callbacks: the address at which a parked call's tool gives the outcome, and what it may send there.

The address has the call's id and an HMAC of the id by SECRET_KEY (SECRET_KEY_FALLBACKS verify, too). Knowing the
address is enough to send the outcome, so it is not stored, and no log, message or export has it.
"""

import contextlib
import hmac
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.core.signing import BadSignature, Signer

from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import MalformedJSON, parse_value
from runs.tools.base import PROGRESS_MAX_CHARS, Parked, ToolFailure, ToolResult, clean_result, tool_error
from runs.tools.http import VALUES_MAX, decoded, read_result, without_tokens
from webhooks.signing import TOLERANCE_SECONDS, standard_signature

PATH = "/api/callbacks/"
ERROR_MAX_CHARS = 1000


def url_of(call_id: str, *, signed: bool = False) -> str:
    """The callback address of a call. ``signed``: the tool must sign what it sends there."""
    return f"{settings.BASE_URL}{PATH}{_signer(signed).sign(call_id)}"


def call_of(token: str) -> tuple[str | None, bool]:
    """The id of the call that the token names, None if the token is not ours; and whether the tool must sign."""
    for signed in (False, True) if token.isascii() else ():
        with contextlib.suppress(BadSignature):
            return _signer(signed).unsign(token), signed
    return None, False


def _signer(signed: bool) -> Signer:
    return Signer(sep=".", salt="runs.callbacks.signed" if signed else "runs.callbacks")


def is_signed(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> bool:
    """Whether a callback is signed with this secret as in the Standard Webhooks specification, and is not too old."""
    name, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    given = headers.get("webhook-signature", "")
    if not re.fullmatch(r"[0-9]{1,12}", timestamp) or abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    expected = standard_signature(secret, name, timestamp, body).encode()
    return any(hmac.compare_digest(one.encode(), expected) for one in given.split(" "))


def read(body: bytes, content_type: str, *, name: str, price: int) -> ToolResult | ToolFailure | Parked:
    """The outcome or progress in a callback, for a call of the tool ``name`` with a hold of ``price`` micro-credits.
    Raises ValidationFailed.
    """
    value = _value(body, content_type)
    kinds = [kind for kind in ("result", "error", "progress") if kind in value] if isinstance(value, dict) else []
    if len(kinds) > 1:
        raise ValidationFailed({kinds[1]: [f"Send {kinds[0]} or {kinds[1]}, not both."]})
    if kinds == ["error"]:
        error = value["error"]
        if not isinstance(error, str) or not 0 < len(error) <= ERROR_MAX_CHARS:
            raise ValidationFailed({"error": [f"A text of 1 to {ERROR_MAX_CHARS} characters is required."]})
        return tool_error(without_tokens(error))
    if kinds == ["progress"]:
        return _progress(value["progress"])
    try:
        return clean_result(read_result(name, price, value if kinds else {"result": value}))
    except ToolFailure as failure:
        raise ValidationFailed({"result": [failure.message]}) from None


def _value(body: bytes, content_type: str) -> Any:
    """The JSON value of the body; or its text, if the body does not claim to be JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        return parse_value(body, values=VALUES_MAX, any_text=True)
    except MalformedJSON as error:
        if not kind.startswith("text/") and (kind.endswith("json") or body.lstrip()[:1] in b'{["'):
            raise ValidationFailed({"body": [error.message]}) from None
        return decoded(body, content_type)


def _progress(given: Any) -> Parked:
    if not isinstance(given, dict):
        raise ValidationFailed({"progress": ["An object with fraction or message is required."]})
    fraction, message = given.get("fraction"), given.get("message")
    if fraction is not None and not (type(fraction) in (int, Decimal) and 0 <= fraction <= 1):
        raise ValidationFailed({"progress.fraction": ["A number from 0 to 1 is required."]})
    if message is not None and not (isinstance(message, str) and len(message) <= PROGRESS_MAX_CHARS):
        raise ValidationFailed({"progress.message": [f"At most {PROGRESS_MAX_CHARS} characters of text are allowed."]})
    return Parked(without_tokens(message or ""), None if fraction is None else float(fraction))
