"""Tests of the dispatcher: slots, claims, limits per endpoint, and isolation from slow receivers."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue

import pytest
from django.db import OperationalError, connection, connections

from config.kernel import clock
from config.outbound import addresses
from tests import factories
from tests.tiers import slow
from tests.webhooks import receiver as behaviours
from tests.webhooks.conftest import attempt, deliver, pass_time, record
from tests.webhooks.receiver import answer
from webhooks import claims, dispatcher, tasks, transitions
from webhooks.claims import Candidate, allocate_slots
from webhooks.models import Attempt, Delivery, Endpoint

GOOD, NEW, BAD = False, None, True


def candidates(count: int, failing: bool | None, in_flight: int = 0) -> list[Candidate]:
    return [Candidate(f"{failing}-{index}", failing, in_flight) for index in range(count)]


# --- the slots of a process ------------------------------------------------------------------------------------------
def test_idle_process_gives_every_endpoint_its_maximum():
    allowed = allocate_slots([*candidates(3, GOOD), *candidates(3, NEW), *candidates(3, BAD)], 0, 512, 50)
    assert set(allowed.values()) == {4}


def test_attempts_in_flight_count_towards_the_limit():
    assert allocate_slots(candidates(1, GOOD, in_flight=3), 0, 512, 50) == {"False-0": 1}
    assert allocate_slots(candidates(1, GOOD, in_flight=4), 0, 512, 50) == {}


@pytest.mark.parametrize(("failing", "most"), [(GOOD, 512), (NEW, 384), (BAD, 256)])
def test_new_and_failing_endpoints_get_only_a_share_of_the_slots(failing, most):
    busy = 0
    many = candidates(1000, failing)
    while allowed := allocate_slots(many, busy, 512, 50):
        busy += sum(allowed.values())
        many = [one for one in many if one.endpoint_id not in allowed]
    assert busy == most


def test_200_hanging_endpoints_leave_free_slots():
    for failing in (NEW, BAD, GOOD):
        waiting = {one.endpoint_id: 0 for one in candidates(200, failing)}
        busy = 0
        while allowed := allocate_slots(
            [Candidate(key, failing, n) for key, n in waiting.items() if n < 4], busy, 512, 50
        ):
            for key, count in allowed.items():
                waiting[key] += count
                busy += count
        assert all(waiting.values()), "an endpoint was left out"
        assert allocate_slots(candidates(1, NEW), busy, 512, 50)
        assert allocate_slots(candidates(1, GOOD), busy, 512, 50)


def test_process_with_one_slot_serves_every_kind_of_endpoint():
    for failing in (GOOD, NEW, BAD):
        assert sum(allocate_slots(candidates(3, failing), 0, 1, 50).values()) == 1


def test_batch_size_is_limited():
    assert sum(allocate_slots(candidates(100, GOOD), 0, 512, 50).values()) == 50


# --- claims ----------------------------------------------------------------------------------------------------------
@pytest.mark.django_db
def test_concurrent_attempts_per_endpoint_are_limited(user, receivers, monkeypatch):
    monkeypatch.setattr("webhooks.claims.WEBHOOK_ENDPOINT_CONCURRENCY", 2)
    factories.EndpointFactory(user=user)
    for _ in range(5):
        record(user)
    first = claims.take_ready(0)[0]
    second = claims.take_ready(2)[0]
    assert (len(first), second) == (2, [])
    pass_time(3600, claim_id=first[0].claim_id)
    transitions.pass_on_due()
    third = claims.take_ready(0)[0]
    assert len(third) == 2


@pytest.mark.django_db(transaction=True)
def test_concurrent_claims_do_not_overlap(user, monkeypatch):
    monkeypatch.setattr("webhooks.claims.WEBHOOK_ENDPOINT_CONCURRENCY", 3)
    users = [factories.UserFactory() for _ in range(5)]
    for someone in users:
        factories.EndpointFactory(user=someone)
        for _ in range(6):
            record(someone)
    barrier = threading.Barrier(6)

    def claim() -> list[Delivery]:
        try:
            barrier.wait()
            return claims.take_ready(0)[0]
        finally:
            connections.close_all()

    with ThreadPoolExecutor(6) as pool:
        taken = [one for batch in pool.map(lambda _: claim(), range(6)) for one in batch]
    assert len({one.pk for one in taken}) == len(taken)
    per_endpoint = [sum(one.endpoint_id == e.pk for one in taken) for e in Endpoint.objects.all()]
    assert per_endpoint == [3] * 5


@pytest.mark.django_db
def test_longest_waiting_deliveries_are_claimed_first(user):
    factories.EndpointFactory(user=user)
    late, early = record(user), record(user)
    pass_time(60, pk=early.pk)
    pass_time(30, pk=late.pk)
    taken = claims.take_ready(0)[0]
    assert [one.pk for one in taken] == [early.pk, late.pk]


@pytest.mark.django_db
def test_long_queue_of_one_endpoint_does_not_delay_others(user):
    factories.EndpointFactory(user=user)
    for _ in range(100):
        record(user)
    other = factories.UserFactory()
    factories.EndpointFactory(user=other)
    mine = record(other)
    taken = claims.take_ready(0)[0]
    assert mine.pk in [one.pk for one in taken]


@pytest.mark.django_db
def test_claim_takes_a_constant_number_of_queries(django_assert_max_num_queries):
    for _ in range(20):
        someone = factories.UserFactory()
        factories.EndpointFactory(user=someone)
        record(someone)
        record(someone)
    with django_assert_max_num_queries(9):
        assert len(claims.take_ready(0)[0]) == 40


@pytest.mark.django_db
def test_outcomes_take_a_constant_number_of_queries(receiver, django_assert_max_num_queries):
    for _ in range(10):
        someone = factories.UserFactory()
        factories.EndpointFactory(user=someone, url=receiver.url, failing=False)
        record(someone)
    outcomes = [attempt(claim) for claim in claims.take_ready(0)[0]]
    with django_assert_max_num_queries(6):
        transitions.record_outcomes(outcomes)
    assert Delivery.objects.filter(status="DELIVERED").count() == 10


@pytest.mark.django_db
def test_health_follows_the_latest_attempt(user, receivers):
    receiver = receivers(answer(500), answer(200))
    factories.EndpointFactory(user=user, url=receiver.url)
    assert Endpoint.objects.get().failing is None
    record(user)
    deliver()
    assert Endpoint.objects.get().failing is True
    pass_time(30)
    deliver()
    assert Endpoint.objects.get().failing is False


@pytest.mark.django_db
def test_full_process_nudges_other_processes(user, nudges, monkeypatch):
    monkeypatch.setattr("webhooks.claims.WEBHOOK_WORKER_CAPACITY", 1)
    factories.EndpointFactory(user=user)
    record(user)
    one = dispatcher.Dispatcher()
    one.in_flight = 1
    nudges.clear()
    one.step()
    one.step()
    assert nudges == [("webhooks.deliver_due", (), None)]


# --- the running dispatcher ------------------------------------------------------------------------------------------
@pytest.fixture
def running():
    """A dispatcher with its thread. It is stopped after the test so that its connection is closed."""
    one = dispatcher.Dispatcher()
    yield one
    one.stop(30)


@pytest.mark.django_db(transaction=True)
def test_hanging_receivers_do_not_delay_others(user, receiver, receivers, running, settings):
    settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = 60
    hanging = receivers(behaviours.hang)
    for _ in range(200):
        someone = factories.UserFactory()
        factories.EndpointFactory(user=someone, url=hanging.url)
        for _ in range(2):
            record(someone)
    running.wake()
    for _ in range(200):
        hanging.arrivals.get(timeout=30)
    factories.EndpointFactory(user=user, url=receiver.url)
    for _ in range(5):
        record(user)
        running.wake()
        receiver.arrivals.get(timeout=30)  # half of the time limit of an attempt
    assert hanging.under_way >= 200, "the hanging attempts had ended"
    hanging.stop()


@pytest.mark.django_db(transaction=True)
def test_hanging_name_resolution_does_not_delay_others(user, receiver, running, monkeypatch, settings):
    settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS = 60
    settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = 60
    release = threading.Event()
    asked: SimpleQueue[str] = SimpleQueue()

    def getaddrinfo(host, port, *args, **kwargs):
        if host == "good.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        asked.put(host)
        release.wait(60)
        raise OSError

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    for number in range(100):
        someone = factories.UserFactory()
        factories.EndpointFactory(user=someone, url=f"http://{number}.hang.example/")
        record(someone)
    running.wake()
    for _ in range(100):
        asked.get(timeout=30)
    factories.EndpointFactory(user=user, url=f"http://good.example:{receiver.port}/")
    record(user)
    running.wake()
    receiver.arrivals.get(timeout=30)
    assert not Attempt.objects.filter(status_code=None).exists(), "the look-ups had ended"
    release.set()


@pytest.mark.django_db(transaction=True)
def test_queue_of_one_endpoint_respects_its_concurrency_limit(user, receivers, running, monkeypatch):
    monkeypatch.setattr("webhooks.claims.WEBHOOK_ENDPOINT_CONCURRENCY", 3)
    release = threading.Event()
    receiver = receivers(behaviours.held(release))
    factories.EndpointFactory(user=user, url=receiver.url)
    for _ in range(12):
        record(user)
    running.wake()
    for _ in range(3):
        receiver.arrivals.get(timeout=30)
    release.set()
    for _ in range(9):
        receiver.arrivals.get(timeout=30)
    running.stop(30)
    assert receiver.most_under_way == 3
    assert Delivery.objects.filter(status="DELIVERED").count() == 12


@pytest.mark.django_db(transaction=True)
def test_stop_finishes_and_records_the_current_attempts(user, receivers, running):
    release = threading.Event()
    receiver = receivers(behaviours.held(release))
    factories.EndpointFactory(user=user, url=receiver.url)
    record(user)
    running.wake()
    receiver.arrivals.get(timeout=30)
    threading.Timer(0.1, release.set).start()
    running.stop(30)
    assert Delivery.objects.get().status == "DELIVERED"
    record(user)
    running.wake()
    assert Delivery.objects.filter(status="PENDING", claim_id=None).count() == 1


@pytest.mark.django_db(transaction=True)
def test_outcome_is_recorded_after_a_database_outage(user, receiver, running, monkeypatch):
    monkeypatch.setattr(dispatcher, "PAUSE_SECONDS", 0.01)
    real, calls = transitions.record_outcomes, []

    def failing_twice(outcomes):
        calls.append(len(outcomes))
        if len(calls) < 3:
            raise OperationalError("gone")
        real(outcomes)

    monkeypatch.setattr(transitions, "record_outcomes", failing_twice)
    factories.EndpointFactory(user=user, url=receiver.url)
    record(user)
    running.wake()
    receiver.arrivals.get(timeout=30)
    running.stop(30)
    assert calls == [1, 1, 1]
    assert Delivery.objects.get().status == "DELIVERED"
    assert len(receiver.requests) == 1


@pytest.mark.django_db(transaction=True)
def test_outcome_that_cannot_be_written_does_not_discard_its_batch(user, receivers, running, monkeypatch):
    """Seven outcomes are recorded together, and the database refuses one of them."""
    real, batches = transitions.record_outcomes, []

    def noted(outcomes):
        batches.append(len(outcomes))
        real(outcomes)

    async def poisoned(claim):
        outcome = await real_attempt(claim)
        if claim.pk == bad.pk:
            outcome.status_code = -1
        return outcome

    real_attempt = dispatcher.attempt
    monkeypatch.setattr(dispatcher, "attempt", poisoned)
    monkeypatch.setattr(transitions, "record_outcomes", noted)
    monkeypatch.setattr(dispatcher, "GATHER_SECONDS", 0.5)
    receiver = receivers(answer())
    for number in range(7):
        someone = factories.UserFactory()
        factories.EndpointFactory(user=someone, url=receiver.url)
        delivery = record(someone)
        if number == 4:
            bad = delivery
    running.wake()
    for _ in range(7):
        receiver.arrivals.get(timeout=30)
    running.stop(30)
    assert max(batches) > 1, "the outcomes were not recorded together"
    assert Delivery.objects.filter(status="DELIVERED").count() == 6
    bad.refresh_from_db()
    assert (bad.status, bad.attempt_count) == ("PENDING", 1)
    assert bad.claim_id


@pytest.mark.django_db
def test_claim_is_returned_if_the_process_stops_before_it_sends(user, endpoint, receiver, monkeypatch):
    delivery, one, real = record(user), dispatcher.Dispatcher(), claims.take_ready

    def stop_after_claim(*arguments):
        taken = real(*arguments)
        one.stop()
        return taken

    monkeypatch.setattr(claims, "take_ready", stop_after_claim)
    deliver(one)
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count, delivery.claim_id) == ("PENDING", 0, None)
    assert receiver.requests == []


@pytest.mark.django_db
def test_claim_is_returned_if_the_machine_was_suspended_before_it_sends(user, endpoint, receiver, monkeypatch):
    """Its claim may lapse during the attempt, so another process could make the next attempt at the same time."""
    delivery, real = record(user), claims.take_ready
    suspensions = [transitions.WEBHOOK_CLAIM_MARGIN_SECONDS + 1, 0]
    now, suspended = clock.now, [0]
    monkeypatch.setattr(clock, "now", lambda: now() + timedelta(seconds=sum(suspended)))

    def take_ready(*arguments):
        found, *rest = real(*arguments)
        if found:
            suspended.append(suspensions.pop(0))
        return found, *rest

    monkeypatch.setattr(claims, "take_ready", take_ready)
    deliver()
    assert suspensions == []
    assert [r.header("X-Service-Delivery-Attempt") for r in receiver.requests] == ["1"]
    delivery.refresh_from_db()
    assert (delivery.status, delivery.attempt_count) == ("DELIVERED", 1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", [*slow(tasks.deliver_due), tasks.retry_due])
def test_tasks_wake_the_dispatcher_of_their_process(user, receiver, monkeypatch, task):
    monkeypatch.setattr(dispatcher, "own", dispatcher.Dispatcher())
    factories.EndpointFactory(user=user, url=receiver.url)
    record(user)
    task()
    receiver.arrivals.get(timeout=30)
    tasks.finish_attempts()
    assert Delivery.objects.get().status == "DELIVERED"


@pytest.mark.django_db(transaction=True)
def test_sending_holds_no_database_connection(user, receivers, running, monkeypatch):
    seen = []
    real = dispatcher.attempt

    async def watched(claim):
        outcome = await real(claim)
        seen.append(connection.connection)
        return outcome

    monkeypatch.setattr(dispatcher, "attempt", watched)
    receiver = receivers(answer())
    factories.EndpointFactory(user=user, url=receiver.url)
    record(user)
    running.wake()
    receiver.arrivals.get(timeout=30)
    running.stop(30)
    assert seen == [None]
