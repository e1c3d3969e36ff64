import json
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import transaction

from config.kernel import clock
from config.kernel.ids import new_id
from tests import factories
from tests.webhooks.conftest import deliver, emit, record
from webhooks import claims
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db


def test_event_is_recorded_for_the_endpoint_of_the_user(user, endpoint):
    run_id, chat_id = new_id("run"), new_id("chat")
    event_id = emit(user.pk, "agent.failed", run_id=run_id, chat_id=chat_id, extra={"errorCode": "MODEL_ERROR"})
    delivery = Delivery.objects.get()
    body = json.loads(delivery.body)
    assert event_id is not None
    assert event_id.startswith("evt_")
    occurred = body.pop("occurredAt")
    assert body == {
        "id": event_id,
        "type": "agent.failed",
        "runId": run_id,
        "chatId": chat_id,
        "errorCode": "MODEL_ERROR",
    }
    assert occurred.endswith("Z")
    assert len(occurred) == len("2026-11-20T12:34:56.789Z")
    assert (delivery.endpoint, delivery.status, delivery.event_id) == (endpoint, "PENDING", event_id)


@pytest.mark.parametrize("amount", ["12.5", "0.000001", "987654321.123457", "10.10", "3"])
def test_amounts_are_recorded_with_every_digit(user, endpoint, amount):
    delivery = record(user, "tool.completed", creditUsed=Decimal(amount))
    assert f'"creditUsed":{amount}}}' in delivery.body


def test_record_takes_one_query(user, endpoint, django_assert_num_queries):
    with django_assert_num_queries(1):
        emit(user.pk, "agent.started", run_id="run_1", chat_id="chat_1")


def test_no_event_is_recorded_without_an_enabled_endpoint(user, receiver, nudges):
    factories.EndpointFactory(user=user, enabled=False)
    other = factories.UserFactory()
    factories.EndpointFactory(user=other, deleted_at="2026-01-01T00:00:00Z")
    factories.EndpointFactory()
    for someone in (user, other, factories.UserFactory()):
        assert emit(someone.pk, "agent.started", run_id="run_1", chat_id="chat_1") is None
    assert not Delivery.objects.exists()
    assert nudges == []


@pytest.mark.django_db(transaction=True)
def test_nudge_is_sent_only_after_the_commit(user, endpoint, nudges):
    with transaction.atomic():
        emit(user.pk, "agent.started", run_id="run_1", chat_id="chat_1")
        assert nudges == []
    assert nudges == [("webhooks.deliver_due", (), None)]


@pytest.mark.django_db(transaction=True)
def test_event_of_a_rolled_back_transaction_is_not_sent(user, endpoint, receiver, nudges):
    with transaction.atomic():
        emit(user.pk, "agent.started", run_id="run_1", chat_id="chat_1")
        transaction.set_rollback(True)
    deliver()
    assert receiver.requests == []
    assert nudges == []


def test_event_is_due_for_a_process_with_a_slightly_slow_clock(user, endpoint, monkeypatch):
    """The clocks of two processes differ slightly, and the nudge is sent once, immediately."""
    delivery = record(user)
    right = clock.now
    monkeypatch.setattr(clock, "now", lambda: right() - timedelta(milliseconds=500))
    assert [claim.pk for claim in claims.take_ready(0)[0]] == [delivery.pk]
