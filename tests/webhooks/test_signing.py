"""Tests of the signatures of deliveries and of their verification."""

import hashlib
import hmac
import json
import logging
from datetime import timedelta
from decimal import Decimal

import pytest
import standardwebhooks
from cryptography.fernet import Fernet
from django.utils import timezone

from config.kernel import clock
from tests import factories
from tests.webhooks.conftest import deliver, pass_time, record
from tests.webhooks.receiver import answer
from webhooks import services
from webhooks.models import Attempt

pytestmark = pytest.mark.django_db


def contract_signature(secret: str, request) -> str:
    """Compute the signature as docs/webhooks.md describes it, independently of the code under test."""
    signed = request.header("X-Service-Timestamp").encode() + b"." + request.body
    return "sha384=" + hmac.new(secret.encode(), signed, hashlib.sha384).hexdigest()


def test_delivery_has_the_documented_headers(user, endpoint, receiver):
    delivery = record(user, "tool.completed", name="calculate", creditUsed=Decimal("0.1"))
    before = timezone.now()
    deliver()
    (request,) = receiver.requests
    assert (request.method, request.path) == ("POST", "/hook")
    assert request.body == delivery.body.encode()
    assert request.header("X-Service-Signature") == contract_signature(endpoint.secret, request)
    assert request.header("X-Service-Event-Id") == delivery.event_id
    assert request.header("X-Service-Delivery-Attempt") == "1"
    assert request.header("Content-Type") == "application/json"
    assert request.header("User-Agent").startswith("AgentWorkflowService")
    assert request.header("Host") == f"127.0.0.1:{receiver.port}"
    milliseconds = int(request.header("X-Service-Timestamp"))
    assert int(before.timestamp() * 1000) - 1 <= milliseconds <= int(timezone.now().timestamp() * 1000) + 1
    names = [name for name, _ in request.headers]
    for name in ("X-Service-Signature", "X-Service-Timestamp", "X-Service-Event-Id", "X-Service-Delivery-Attempt"):
        assert names.count(name) == 1


def test_the_signed_time_is_that_of_the_database(user, endpoint, receiver, monkeypatch):
    """The clock of the machine may be wrong. Receivers refuse a time that is far from their own."""
    right = clock.now
    monkeypatch.setattr(clock, "now", lambda: right() + timedelta(hours=1))
    record(user)
    expected = clock.now()
    deliver()
    (request,) = receiver.requests
    assert int(request.header("X-Service-Timestamp")) >= int(expected.timestamp() * 1000)


def test_standard_webhooks_library_verifies(user, endpoint, receiver):
    delivery = record(user, "tool.completed", creditUsed=Decimal("12.5"))
    deliver()
    (request,) = receiver.requests
    event = standardwebhooks.Webhook(endpoint.secret).verify(request.body, dict(request.headers))
    assert event["creditUsed"] == 12.5
    assert request.header("webhook-id") == delivery.event_id
    assert request.header("webhook-timestamp") == str(int(request.header("X-Service-Timestamp")) // 1000)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook("ab" * 32).verify(request.body, dict(request.headers))
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(endpoint.secret).verify(request.body + b" ", dict(request.headers))


def test_grace_window_signs_with_both_secrets(user, endpoint, receivers):
    receiver = receivers(answer(500))
    old = endpoint.secret
    rotated, _ = services.register(user, receiver.url, rotate=True)
    assert rotated.secret != old
    record(user)
    for _ in range(4):
        deliver()
        pass_time(600)
    signed_by = [
        {contract_signature(rotated.secret, r): "new", contract_signature(old, r): "old"}[
            r.header("X-Service-Signature")
        ]
        for r in receiver.requests
    ]
    assert signed_by == ["new", "old", "new", "old"]
    for request in receiver.requests:
        assert len(request.header("webhook-signature").split(" ")) == 2
        for secret in (old, rotated.secret):
            standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))


def test_previous_secret_is_not_used_after_the_grace_window(user, endpoint, receivers):
    receiver = receivers(answer(500))
    rotated, _ = services.register(user, receiver.url, rotate=True)
    type(rotated).objects.update(secondary_expires_at=timezone.now() - timedelta(seconds=1))
    record(user)
    deliver()
    pass_time(30)
    deliver()
    assert len(receiver.requests) == 2
    for request in receiver.requests:
        assert request.header("X-Service-Signature") == contract_signature(rotated.secret, request)
        assert " " not in request.header("webhook-signature")


def test_secret_that_cannot_be_decrypted_does_not_affect_other_users(user, endpoint, receiver, settings):
    lost = factories.UserFactory()
    keys = settings.ENCRYPTION_KEYS
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    factories.EndpointFactory(user=lost, url=receiver.url)
    settings.ENCRYPTION_KEYS = keys
    bad, good = record(lost), record(user)
    deliver()
    good.refresh_from_db()
    assert good.status == "DELIVERED"
    assert "can't be decrypted" in bad.attempts.get().error


@pytest.mark.parametrize("lost", ["secret", "secondary_secret"])
def test_lost_previous_secret_does_not_prevent_a_delivery(user, endpoint, receiver, settings, lost):
    services.register(user, receiver.url, rotate=True)
    keys = settings.ENCRYPTION_KEYS
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    type(endpoint).objects.update(**{lost: "ab" * 32})
    settings.ENCRYPTION_KEYS = keys
    delivery = record(user)
    deliver()
    delivery.refresh_from_db()
    # The signature needs the current secret. The signature with the previous secret is optional.
    assert delivery.status == ("PENDING" if lost == "secret" else "DELIVERED")


def test_secrets_are_not_logged(user, endpoint, receiver, receivers, caplog):
    services.register(user, receivers(answer(500)).url + "?token=hush", rotate=True)
    endpoint.refresh_from_db()
    record(user)
    with caplog.at_level(logging.DEBUG):
        deliver()
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith("django.db"))
    for secret in (endpoint.secret, endpoint.secondary_secret, "hush"):
        assert secret not in ours
    error = json.dumps(list(Attempt.objects.values("error")))
    assert "hush" not in error
