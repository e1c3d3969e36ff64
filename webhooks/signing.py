"""The headers that prove that a delivery is ours, and their verification as receivers do it.

A delivery has two signatures: ours (HMAC-SHA384, docs/webhooks.md) and that of the Standard Webhooks specification
(HMAC-SHA256), so that public libraries can verify deliveries.
"""

import base64
import hmac
from collections.abc import Mapping

TOLERANCE_SECONDS = 300


class VerificationFailed(Exception):
    """The delivery is not ours, or too old. The message names the rule that it breaks."""


def contract_signature(secret: str, timestamp: str, body: bytes) -> str:
    """``sha384=<hex>`` over ``<timestamp>.<body>``, keyed with the secret as it is shown."""
    return "sha384=" + hmac.digest(secret.encode(), timestamp.encode() + b"." + body, "sha384").hex()


def standard_signature(secret: str, event_id: str, timestamp: str, body: bytes) -> str:
    """``v1,<base64>`` over ``<id>.<timestamp>.<body>``, keyed with the base64 decoding of the secret as it is shown."""
    digest = hmac.digest(base64.b64decode(secret), f"{event_id}.{timestamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


def signed_headers(event_id: str, number: int, body: bytes, milliseconds: int, secrets: list[str]) -> dict[str, str]:
    """All headers that depend on the attempt. ``secrets``: the endpoint's secret, and in the grace window also the
    previous one. Then even attempts are signed with the previous secret, so a receiver that knows only one of the two
    accepts the delivery at its second attempt at the latest. The standard's header has both signatures.
    """
    timestamp, seconds = str(milliseconds), str(milliseconds // 1000)
    return {
        "X-Service-Signature": contract_signature(secrets[-1 if number % 2 == 0 else 0], timestamp, body),
        "X-Service-Timestamp": timestamp,
        "X-Service-Event-Id": event_id,
        "X-Service-Delivery-Attempt": str(number),
        "webhook-id": event_id,
        "webhook-timestamp": seconds,
        "webhook-signature": " ".join(standard_signature(key, event_id, seconds, body) for key in secrets),
    }


def verify(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> None:
    """Check both signatures and both timestamps, at ``now`` (epoch seconds). Raises VerificationFailed."""
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        signature, timestamp = lower["x-service-signature"], lower["x-service-timestamp"]
        event_id, seconds = lower["webhook-id"], lower["webhook-timestamp"]
        standard = lower["webhook-signature"].split(" ")
    except KeyError as error:
        raise VerificationFailed(f"the header {error.args[0]} is missing") from None
    if not hmac.compare_digest(signature.encode(), contract_signature(secret, timestamp, body).encode()):
        raise VerificationFailed("X-Service-Signature does not match")
    expected = standard_signature(secret, event_id, seconds, body).encode()
    if not any(hmac.compare_digest(candidate.encode(), expected) for candidate in standard):
        raise VerificationFailed("webhook-signature does not match")
    for moment in (int(timestamp) / 1000, int(seconds)):
        if abs(now - moment) > TOLERANCE_SECONDS:
            raise VerificationFailed(f"the timestamp is more than {TOLERANCE_SECONDS} seconds off")
