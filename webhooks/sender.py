"""One attempt: signs and sends a delivery, and returns the outcome. It never touches the database."""

import logging
import time

from django.conf import settings

from config.outbound import client
from config.telemetry import logs
from webhooks import signing
from webhooks.claims import Claim
from webhooks.models import Attempt

# The most bytes of a receiver's answer that are read.
WEBHOOK_ANSWER_MAX_BYTES = 64 * 1024

logger = logging.getLogger(__name__)

USER_AGENT = "AgentWorkflowService-Webhooks/1.0"
ERROR_MAX_CHARS = 200
# The part of a receiver's answer that is kept, for staff who look into a failure.
KEPT_BYTES = 1024


async def attempt(claim: Claim) -> Attempt:
    """Never raises: a failure is an outcome. Sets the context of log lines, so it needs a task of its own."""
    logs.request_id.set(claim.delivery.request_id or logs.NONE)
    logs.run_id.set(claim.delivery.run_id)
    logs.task_id.set(claim.delivery.pk)
    started_at, tick = claim.now(), time.monotonic()
    status_code, error, kept = None, None, ""
    try:
        answer = await _send(claim, int(started_at.timestamp() * 1000))
        status_code, kept = answer.status, as_text(answer.body[:KEPT_BYTES])
    except (client.RequestFailed, client.AddressRefused, ValueError) as failure:
        error = str(failure)[:ERROR_MAX_CHARS]
    except Exception as failure:
        logger.exception(
            "attempt %s of delivery %s failed unexpectedly", claim.delivery.attempt_count, claim.delivery.pk
        )
        error = f"Internal error ({type(failure).__name__})."
    duration_ms = round((time.monotonic() - tick) * 1000)
    outcome = claim.delivery.attempt(
        started_at=started_at, duration_ms=duration_ms, status_code=status_code, error=error, answer=kept
    )
    if not outcome.succeeded:
        logger.info("attempt %s failed: %s", claim.delivery.attempt_count, error or f"status {status_code}")
    return outcome


def as_text(body: bytes) -> str:
    """``body`` as text that the database can store."""
    return body.decode("utf-8", "replace").replace("\0", "\ufffd")


async def _send(claim: Claim, milliseconds: int) -> client.Answer:
    if not claim.secrets:
        raise client.RequestFailed(
            "The endpoint's secret can't be decrypted; register it with rotateSecret for a new one."
        )
    delivery, body = claim.delivery, claim.delivery.body.encode()
    headers = signing.signed_headers(delivery.event_id, delivery.attempt_count, body, milliseconds, claim.secrets)
    return await client.asend(
        "POST",
        delivery.endpoint.url,
        headers={**headers, "Content-Type": "application/json", "User-Agent": USER_AGENT},
        body=body,
        connect_timeout=settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS,
        total_timeout=settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS,
        max_bytes=WEBHOOK_ANSWER_MAX_BYTES,
        allow_private=settings.OUTBOUND_ALLOW_PRIVATE,
        https_only=not settings.OUTBOUND_ALLOW_PRIVATE,
        reuse=True,
    )
