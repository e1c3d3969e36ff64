"""Tests of deliveries to real sockets, and of the handling of failures."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from tests import factories
from tests.webhooks import receiver as behaviours
from tests.webhooks.conftest import attempt, deliver, pass_time, record
from tests.webhooks.receiver import answer
from webhooks import claims, services, tasks, transitions
from webhooks.models import Attempt, Delivery
from webhooks.transitions import WAITS

pytestmark = pytest.mark.django_db


def test_delivered_is_final(user, endpoint, receiver):
    delivery = record(user)
    deliver()
    deliver()
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count, delivery.next_attempt_at) == ("DELIVERED", 1, None)
    assert delivery.finished_at is not None
    assert len(receiver.requests) == 1
    attempt = delivery.attempts.get()
    assert (attempt.number, attempt.status_code, attempt.error) == (1, 200, None)
    assert attempt.started_at <= timezone.now()


@pytest.mark.django_db(transaction=True)
def test_failed_attempts_are_repeated_with_increasing_waits(user, endpoint, receivers, nudges):
    """The waits before attempts are 0, 30, 90, 270 and 600 s after the previous one. Then the delivery is dead."""
    receiver = receivers(answer(500))
    services.register(user, receiver.url, rotate=False)
    delivery = record(user)
    deliver()
    for number, wait in enumerate((30, 90, 270, 600), start=1):
        delivery.refresh_from_db()
        attempt = delivery.attempts.get(number=number)
        ended = attempt.started_at + timedelta(milliseconds=attempt.duration_ms)
        assert (delivery.status, delivery.attempt_count) == ("PENDING", number)
        # the recorded duration is rounded to a millisecond
        assert delivery.next_attempt_at - ended >= timedelta(seconds=wait, milliseconds=-1)
        assert delivery.next_attempt_at <= timezone.now() + timedelta(seconds=wait)
        task, arguments, countdown = nudges[-1]
        assert (task, arguments) == ("webhooks.retry_due", ())
        assert wait <= countdown <= wait + 1
        pass_time(wait - 10)
        deliver()
        assert len(receiver.requests) == number, "an attempt was early"
        pass_time(10)
        deliver()
        assert len(receiver.requests) == number + 1
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count, delivery.next_attempt_at) == ("DEAD", 5, None)
    pass_time(10_000)
    deliver()
    assert len(receiver.requests) == 5
    assert [r.header("X-Service-Delivery-Attempt") for r in receiver.requests] == ["1", "2", "3", "4", "5"]
    assert len({r.body for r in receiver.requests}) == 1
    assert {r.header("X-Service-Event-Id") for r in receiver.requests} == {delivery.event_id}
    assert {r.header("webhook-id") for r in receiver.requests} == {delivery.event_id}
    assert [a.status_code for a in delivery.attempts.all()] == [500] * 5
    assert [task for task, _, _ in nudges].count("webhooks.retry_due") == 4


def test_waits_are_shorter_than_the_visibility_timeout_of_the_broker(settings):
    """The broker delivers a message again if a worker holds it for longer than the visibility timeout."""
    patience = settings.CELERY_BROKER_TRANSPORT_OPTIONS["visibility_timeout"]
    assert patience > max(WAITS) + transitions.NUDGE_MARGIN + settings.WEBHOOK_SWEEP_SECONDS


def test_succeeds_at_a_later_attempt(user, endpoint, receivers):
    receiver = receivers(answer(503), behaviours.close, answer(204, b""))
    services.register(user, receiver.url, rotate=False)
    delivery = record(user)
    for _ in range(3):
        deliver()
        pass_time(600)
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("DELIVERED", 3)
    assert [(a.status_code, a.error is None) for a in delivery.attempts.all()] == [
        (503, True),
        (None, False),
        (204, True),
    ]


@pytest.mark.parametrize("status", [300, 304, 400, 404, 410, 429, 500])
def test_any_other_status_fails(user, endpoint, receivers, status):
    services.register(user, receivers(answer(status, b"")).url, rotate=False)
    delivery = record(user)
    deliver()
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempts.get().status_code) == ("PENDING", status)


def test_redirect_is_not_followed(user, endpoint, receiver, receivers):
    elsewhere = receivers(answer())
    services.register(user, receivers(behaviours.redirect(elsewhere.url)).url, rotate=False)
    delivery = record(user)
    deliver()
    assert elsewhere.requests == []
    assert delivery.attempts.get().status_code == 302


@pytest.mark.parametrize("behaviour", [behaviours.hang, behaviours.drip_header, behaviours.drip_body])
def test_attempt_has_a_time_limit(user, endpoint, receivers, settings, behaviour):
    settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = 0.3
    services.register(user, receivers(behaviour).url, rotate=False)
    delivery = record(user)
    deliver()
    attempt = delivery.attempts.get()
    assert (attempt.status_code, attempt.error) == (None, "Timed out after 0.3 s.")
    assert attempt.duration_ms >= 290


def test_endless_answer_is_read_up_to_the_limit(user, endpoint, receivers, monkeypatch):
    monkeypatch.setattr("webhooks.dispatcher.WEBHOOK_ANSWER_MAX_BYTES", 1000)
    receiver = receivers(behaviours.endless_body)
    services.register(user, receiver.url, rotate=False)
    delivery = record(user)
    deliver()
    delivery.refresh_from_db()
    assert delivery.status == "DELIVERED"


@pytest.mark.parametrize("behaviour", [behaviours.close, behaviours.garbage])
def test_no_answer_is_a_failure(user, endpoint, receivers, behaviour):
    services.register(user, receivers(behaviour).url, rotate=False)
    delivery = record(user)
    deliver()
    attempt = delivery.attempts.get()
    assert attempt.status_code is None
    assert attempt.error in ("The connection was closed without an answer.", "The answer was not HTTP.")


def test_refused_connection_is_a_failure(user, receiver):
    factories.EndpointFactory(user=user, url=receiver.url)
    receiver.stop()
    delivery = record(user)
    deliver()
    assert delivery.attempts.get().error == "The connection was refused."


def test_private_address_is_refused_at_each_attempt(user, endpoint, receiver, settings):
    """The setting or the address of the host name may have changed since the registration."""
    settings.OUTBOUND_ALLOW_PRIVATE = False
    type(endpoint).objects.update(url=f"https://127.0.0.1:{receiver.port}/")
    delivery = record(user)
    deliver()
    assert delivery.attempts.get().error == "The host's address is not public."
    type(endpoint).objects.update(url=receiver.url)
    pass_time(30)
    deliver()
    assert delivery.attempts.get(number=2).error == "The URL must be https."
    assert receiver.connections == 0


@pytest.mark.parametrize("state", ["ready", "waiting", "claimed"])
def test_disabled_endpoint_gets_no_more_deliveries(user, endpoint, receivers, state):
    receiver = receivers(answer(500), answer(200))
    services.register(user, receiver.url, rotate=False)
    pending = record(user)
    if state == "waiting":
        deliver()
    elif state == "claimed":
        claims.take_ready(0)
    sent = len(receiver.requests)
    services.change(user, enabled=False)
    assert claims.take_ready(0)[0] == []
    deliver()
    pending.refresh_from_db()
    assert pending.status == "DEAD"
    services.change(user, enabled=True)
    deliver()
    assert len(receiver.requests) == sent
    record(user)
    deliver()
    assert len(receiver.requests) == sent + 1


def test_endpoint_that_is_enabled_again_gets_nothing_until_all_dropped_deliveries_are_dead(
    user, endpoint, receiver, monkeypatch
):
    monkeypatch.setattr(transitions, "BATCH", 2)
    dropped = [record(user).pk for _ in range(5)]
    services.change(user, enabled=False)
    services.change(user, enabled=True)
    kept = record(user)
    while transitions.anything_due()[2]:
        assert claims.take_ready(0)[0] == []
        assert transitions.pass_on_due()
    assert set(Delivery.objects.filter(status="DEAD").values_list("pk", flat=True)) == set(dropped)
    deliver()
    assert [request.header("X-Service-Event-Id") for request in receiver.requests] == [kept.event_id]


def test_deleted_endpoint_gets_no_more_deliveries(user, endpoint, receiver):
    pending = record(user)
    services.delete_endpoint(user)
    deliver()
    pending.refresh_from_db()
    assert pending.status == "DEAD"
    assert receiver.requests == []


def test_oldest_deliveries_of_a_full_endpoint_are_dropped(user, endpoint, receiver, monkeypatch):
    """Deliveries that wait count, too. A delivery that is being sent is never dropped."""
    monkeypatch.setattr(transitions, "BATCH", 2)
    monkeypatch.setattr("webhooks.transitions.WEBHOOK_PENDING_MAX", 4)
    monkeypatch.setattr("webhooks.claims.WEBHOOK_ENDPOINT_CONCURRENCY", 1)
    records = [record(user) for _ in range(9)]
    Delivery.objects.filter(pk=records[3].pk).update(
        ready=False, next_attempt_at=timezone.now() + timedelta(seconds=30), attempt_count=1
    )
    (under_way,) = claims.take_ready(0)[0]
    factories.EndpointFactory(user=(other := factories.UserFactory()), url=receiver.url)
    others = [record(other) for _ in range(4)]
    transitions.drop_excess()
    assert under_way.pk == records[0].pk
    dead = [one.pk for one in records[1:5]]
    assert set(Delivery.objects.filter(status="DEAD").values_list("pk", flat=True)) == set(dead)
    assert Delivery.objects.filter(pk__in=[one.pk for one in others], status="PENDING").count() == 4
    transitions.drop_excess()
    assert Delivery.objects.filter(status="DEAD").count() == 4


def test_delivery_recorded_while_its_endpoint_was_disabled_is_not_sent(user, endpoint, receiver):
    """The event's transaction read an enabled endpoint and committed after the endpoint was disabled."""
    delivery = record(user)
    type(endpoint).objects.update(enabled=False)
    deliver()
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("DEAD", 0)
    assert receiver.requests == []


def test_attempt_of_a_dead_worker_is_repeated_after_its_claim_expired(user, endpoint, receiver, settings):
    delivery = record(user)
    (lost,) = claims.take_ready(0)[0]  # a worker dies after its claim
    assert lost.attempt_count == 1
    deliver()
    tasks.sweep()
    pass_time(settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS)
    deliver()
    assert delivery.attempts.count() == 0, "the attempt may still be under way"
    pass_time(transitions.WEBHOOK_CLAIM_MARGIN_SECONDS)
    begun = timezone.now()
    deliver()
    assert receiver.requests == []
    assert [(a.number, a.status_code, a.error) for a in delivery.attempts.all()] == [
        (1, None, "The outcome is not known.")
    ]
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("PENDING", 1)
    assert delivery.next_attempt_at - begun >= timedelta(seconds=30)
    pass_time(30)
    deliver()
    assert [r.header("X-Service-Delivery-Attempt") for r in receiver.requests] == ["2"]
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("DELIVERED", 2)


def test_delivery_whose_every_claim_lapses_is_dead_after_the_fifth(user, endpoint):
    delivery = record(user)
    for number in range(1, 6):
        (lost,) = claims.take_ready(0)[0]
        assert lost.attempt_count == number
        for _ in range(2):  # the claim lapses, the wait ends
            pass_time(3600)
            transitions.pass_on_due()
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("DEAD", 5)
    assert [a.error for a in delivery.attempts.all()] == ["The outcome is not known."] * 5
    assert claims.take_ready(0)[0] == []


def test_attempt_that_was_not_sent_does_not_count(user, endpoint, receiver):
    delivery = record(user)
    (claim,) = claims.take_ready(0)[0]
    transitions.record_outcomes([claim.attempt()])
    delivery.refresh_from_db()
    assert (delivery.attempt_count, delivery.claim_id, delivery.attempts.count()) == (0, None, 0)
    transitions.record_outcomes([claim.attempt()])
    deliver()
    assert [r.header("X-Service-Delivery-Attempt") for r in receiver.requests] == ["1"]
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("DELIVERED", 1)


def test_outcome_of_an_expired_claim_is_ignored(user, endpoint, receivers):
    """A slow worker reports its outcome after the claim was found lapsed, and after another worker claimed."""
    receiver = receivers(answer(200), answer(500))
    services.register(user, receiver.url, rotate=False)
    delivery = record(user)
    (stale,) = claims.take_ready(0)[0]
    outcome = attempt(stale)
    pass_time(3600)
    transitions.pass_on_due()
    transitions.record_outcomes([outcome])
    pass_time(3600)
    transitions.pass_on_due()
    (fresh,) = claims.take_ready(0)[0]
    transitions.record_outcomes([outcome])
    delivery.refresh_from_db()
    assert (delivery.status, delivery.claim_id, delivery.attempts.count()) == ("PENDING", fresh.claim_id, 1)
    transitions.record_outcomes([attempt(fresh)])
    transitions.record_outcomes([outcome])
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("PENDING", 2)
    assert [a.status_code for a in Attempt.objects.order_by("number")] == [None, 500]


def test_sweep_nudges_only_for_due_deliveries(user, endpoint, nudges):
    tasks.sweep()
    assert nudges == []
    delivery = record(user)
    tasks.sweep()
    assert nudges == [("webhooks.deliver_due", (), None)]
    Delivery.objects.filter(pk=delivery.pk).update(ready=False, next_attempt_at=timezone.now() + timedelta(seconds=60))
    tasks.sweep()
    assert len(nudges) == 1


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b"", ""),
        (b"no such hook", "no such hook"),
        (b"a" * 2000, "a" * 1024),
        (b"caf\xc3\xa9 \xff\0 <b>", "caf\u00e9 \ufffd\ufffd <b>"),
        (("\N{FOX FACE}" * 300).encode(), "\N{FOX FACE}" * 256),
    ],
)
def test_beginning_of_the_answer_is_stored(user, endpoint, receivers, body, kept):
    services.register(user, receivers(answer(500, body)).url, rotate=False)
    delivery = record(user)
    deliver()
    assert delivery.attempts.get().answer == kept


def test_attempt_without_an_answer_stores_none(user, endpoint, receivers):
    services.register(user, receivers(behaviours.close).url, rotate=False)
    delivery = record(user)
    deliver()
    assert delivery.attempts.get().answer == ""


def test_prune_deletes_deliveries_past_their_retention(user, endpoint, receiver, settings, monkeypatch):
    monkeypatch.setattr(services, "PURGE_BATCH", 2)
    old = [record(user) for _ in range(5)]
    deliver()
    kept = record(user)
    deliver()
    pending = record(user)
    past = timezone.now() - timedelta(days=settings.WEBHOOK_RETENTION_DAYS, seconds=1)
    Delivery.objects.filter(pk__in=[d.pk for d in old]).update(finished_at=past)
    gone = factories.EndpointFactory(deleted_at=past)
    factories.EndpointFactory(user=gone.user)
    tasks.prune()
    assert set(Delivery.objects.values_list("pk", flat=True)) == {kept.pk, pending.pk}
    assert Attempt.objects.count() == 1
    assert not type(gone).objects.filter(pk=gone.pk).exists()
    assert type(gone).objects.count() == 2


@pytest.mark.parametrize("finished", [True, False])
def test_the_database_refuses_an_unknown_status(endpoint, finished):
    times = {} if finished else {"finished_at": None, "next_attempt_at": timezone.now()}
    with pytest.raises(IntegrityError, match="delivery_due_until_finished"), transaction.atomic():
        factories.DeliveryFactory(endpoint=endpoint, status="LOST", **times)
