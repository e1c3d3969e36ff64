"""Tests of the extended events and of the installation endpoint, which gets the events of all users."""

import json

import pytest
from django.db import IntegrityError, transaction

from runs import lifecycle
from tests import factories
from tests.webhooks.conftest import deliver, emit, pass_time, record
from tests.webhooks.receiver import answer
from webhooks import claims, services, signing, transitions
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db
URL = "/api/v1/webhooks"


@pytest.fixture
def installation(receivers):
    receiver = receivers(answer(200))
    endpoint, _ = services.register(services.INSTALLATION, receiver.url, rotate=False, extended=True)
    return endpoint, receiver


def types(endpoint: Endpoint) -> list[str]:
    return list(
        Delivery.objects.filter(endpoint=endpoint).order_by("created_at", "pk").values_list("event_type", flat=True)
    )


def test_endpoint_gets_extended_events_only_if_it_asks_for_them(session, user):
    first = session.post(URL, {"url": "http://127.0.0.1:9000/"}, format="json").json()
    assert first["extendedEvents"] is False
    waiting = {"run_id": "run_1", "chat_id": "chat_1", "extra": {}}
    assert emit(user.pk, "agent.waiting", **waiting) is None
    for change in (
        lambda: session.patch(URL, {"extendedEvents": True}, format="json"),
        lambda: session.post(URL, {"url": "http://127.0.0.1:9000/b"}, format="json"),  # does not change it
        lambda: session.post(URL, {"url": "http://127.0.0.1:9000/b", "extendedEvents": True}, format="json"),
    ):
        answered = change()
        assert (answered.status_code, answered.json()["extendedEvents"]) == (200, True)
    assert answered.json()["enabled"] is True
    assert emit(user.pk, "agent.waiting", **waiting) is not None
    assert session.get(URL).json()["extendedEvents"] is True
    assert session.patch(URL, {"extendedEvents": False}, format="json").json()["extendedEvents"] is False
    assert emit(user.pk, "agent.cancelled", **waiting) is None


@pytest.mark.parametrize("body", [{}, {"extendedEvents": None}, {"extendedEvents": "yes"}])
def test_wrong_changes_are_refused(session, user, body):
    factories.EndpointFactory(user=user)
    assert session.patch(URL, body, format="json").status_code == 400


def test_installation_endpoint_gets_events_of_all_users_with_their_names(user, endpoint, receiver, installation):
    central, at_centre = installation
    names = ["alice", 'o"hara \\ ünï', "x" * 150]
    for name in names:
        emit(factories.UserFactory(username=name).pk, "agent.started", run_id=name[:30], chat_id="chat_1")
    event_id = emit(user.pk, "agent.failed", run_id="r", chat_id="c", extra={"errorCode": "MODEL_ERROR"})
    deliver()
    bodies = (json.loads(request.body) for request in at_centre.requests)
    got = {body["userId"]: body for body in bodies if body["type"] != "credits.granted"}
    assert set(got) == {*names, user.username}
    assert {got[name]["runId"] for name in names} == {name[:30] for name in names}
    (own,) = receiver.requests
    body = json.loads(own.body)
    assert body | {"userId": user.username} == got[user.username]
    assert "userId" not in body
    assert body["id"] == event_id
    for request in at_centre.requests:
        headers = dict(request.headers)
        signing.verify(headers, request.body, central.secret, int(headers["webhook-timestamp"]))


def test_installation_endpoint_is_retried_with_the_same_bytes(user, installation, receivers):
    receiver = receivers(answer(500), answer(200))
    Endpoint.objects.update(url=receiver.url)
    emit(user.pk, "agent.started", run_id="r", chat_id="c")
    deliver()
    pass_time(30)
    deliver()
    assert len(receiver.requests) == 2
    assert len({request.body for request in receiver.requests}) == 1
    assert Delivery.objects.get().status == "DELIVERED"


def test_users_do_not_see_the_installation_endpoint(user, session, installation):
    emit(user.pk, "agent.started", run_id="r", chat_id="c")
    assert Delivery.objects.count() == 1
    assert session.get(URL).status_code == 404
    assert session.get(f"{URL}/deliveries").json()["items"] == []
    assert session.delete(URL).status_code == 404
    registered = session.post(URL, {"url": "http://127.0.0.1:9000/"}, format="json").json()
    assert registered["id"] != installation[0].pk
    assert Endpoint.objects.filter(deleted_at=None).count() == 2


def test_one_statement_records_an_event_for_both(user, endpoint, installation, django_assert_num_queries):
    with django_assert_num_queries(1):
        emit(user.pk, "agent.started", run_id="run_1", chat_id="chat_1")
    assert Delivery.objects.values("event_id").distinct().count() == 1
    assert Delivery.objects.count() == 2


def test_there_is_one_installation_endpoint(installation):
    with pytest.raises(IntegrityError), transaction.atomic():
        factories.EndpointFactory(user=None)
    services.delete_endpoint(services.INSTALLATION)
    factories.EndpointFactory(user=None)


def test_disabled_endpoint_of_a_user_does_not_stop_the_installation_endpoint(user, endpoint, installation):
    services.change(user, enabled=False)
    record(user)
    assert types(endpoint) == []
    assert types(installation[0]) == ["agent.started"]


def test_installation_endpoint_has_limits_of_its_own(user, endpoint, installation, monkeypatch):
    monkeypatch.setattr("webhooks.claims.WEBHOOK_ENDPOINT_CONCURRENCY", 1)
    monkeypatch.setattr("webhooks.claims.WEBHOOK_INSTALLATION_CONCURRENCY", 3)
    for _ in range(5):
        emit(user.pk, "agent.started", run_id="run_1", chat_id="chat_1")
    monkeypatch.setattr("webhooks.transitions.WEBHOOK_PENDING_MAX", 2)
    monkeypatch.setattr("webhooks.transitions.WEBHOOK_INSTALLATION_PENDING_MAX", 4)
    assert transitions.drop_excess() == 4
    dead = Delivery.objects.filter(status="DEAD")
    assert [dead.filter(endpoint=one).count() for one in (endpoint, installation[0])] == [3, 1]
    taken = [claim.endpoint_id for claim in claims.take_ready(0)[0]]
    assert (taken.count(endpoint.pk), taken.count(installation[0].pk)) == (1, 3)
    assert claims.take_ready(4)[0] == []


@pytest.mark.django_db(transaction=True)
def test_cancelled_line_is_reported(user, session, endpoint, installation):
    Endpoint.objects.filter(pk=endpoint.pk).update(extended_events=True)
    chat = session.post("/api/v1/chats", {}, format="json").json()["id"]
    runs = [
        session.post(f"/api/v1/chats/{chat}/runs", {"message": "Hi", "onActiveRun": "enqueue"}, format="json").json()
        for _ in range(3)
    ]
    assert session.delete(f"/api/v1/chats/{chat}").status_code == 204
    for one in (endpoint, installation[0]):
        cancelled = Delivery.objects.filter(endpoint=one, event_type="agent.cancelled")
        assert sorted(cancelled.values_list("run_id", flat=True)) == sorted(run["id"] for run in runs)
    assert lifecycle.violations() == []
    Delivery.objects.filter(endpoint=installation[0], run_id=runs[0]["id"]).delete()
    Endpoint.objects.update(updated_at="2026-01-01T00:00:00Z")
    (found,) = lifecycle.violations()
    assert "agent.cancelled happened 1 times" in found
