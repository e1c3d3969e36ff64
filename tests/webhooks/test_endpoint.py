"""Tests of POST, GET, PATCH and DELETE /webhooks, and of GET /webhooks/deliveries."""

import json
import threading
from datetime import timedelta

import pytest
from cryptography.fernet import Fernet
from django.db import IntegrityError, connection, connections
from django.utils import timezone

from config.api.models import IdempotencyRecord
from tests import factories
from tests.webhooks.conftest import deliver, pass_time, record
from tests.webhooks.receiver import answer
from webhooks import signing
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db

URL = "/api/v1/webhooks"
FIELDS = {"id", "url", "secret", "secondarySecret", "enabled", "extendedEvents", "createdAt", "updatedAt"}


def post(session, **body):
    return session.post(URL, body, format="json")


def test_first_call_creates_the_endpoint(session, user):
    answer = post(session, url="http://127.0.0.1:9000/hook")
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == FIELDS
    assert body["id"].startswith("whe_")
    assert (body["url"], body["enabled"], body["secondarySecret"]) == ("http://127.0.0.1:9000/hook", True, None)
    assert len(body["secret"]) == 64
    assert set(body["secret"]) <= set("0123456789abcdef")
    assert Endpoint.objects.get(user=user).secret == body["secret"]


def test_secret_is_encrypted_at_rest(session):
    secret = post(session, url="http://127.0.0.1:9000/").json()["secret"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT secret FROM webhooks_endpoint")
        assert secret not in cursor.fetchone()[0]


def test_secret_is_shown_once(session):
    secret = post(session, url="http://127.0.0.1:9000/").json()["secret"]
    masked = "••••" + secret[-4:]
    assert session.get(URL).json()["secret"] == masked
    assert post(session, url="http://127.0.0.1:9000/").json()["secret"] == masked
    assert session.patch(URL, {"enabled": True}, format="json").json()["secret"] == masked


def test_repeated_call_updates_the_endpoint(session):
    first = post(session, url="http://127.0.0.1:9000/a").json()
    second = post(session, url="http://127.0.0.1:9000/b", rotateSecret=False).json()
    assert second["id"] == first["id"]
    assert second["url"] == "http://127.0.0.1:9000/b"
    assert second["secondarySecret"] is None
    assert Endpoint.objects.get().secret == first["secret"]


def test_rotation(session, settings):
    first = post(session, url="http://127.0.0.1:9000/").json()
    second = post(session, url="http://127.0.0.1:9000/", rotateSecret=True).json()
    assert second["id"] == first["id"]
    assert len(second["secret"]) == 64
    assert second["secret"] != first["secret"]
    assert second["secondarySecret"] == first["secret"]
    masked = {"secret": "••••" + second["secret"][-4:], "secondarySecret": "••••" + first["secret"][-4:]}
    changed = session.patch(URL, {"enabled": True}, format="json")
    for later in (session.get(URL), post(session, url="http://127.0.0.1:9000/"), changed):
        assert {name: later.json()[name] for name in masked} == masked
    endpoint = Endpoint.objects.get()
    assert endpoint.secondary_secret == first["secret"]
    left = endpoint.secondary_expires_at - timezone.now()
    assert timedelta(hours=23, minutes=59) < left <= timedelta(hours=24)
    Endpoint.objects.update(secondary_expires_at=timezone.now())
    assert session.get(URL).json()["secondarySecret"] is None


def test_rotation_on_the_first_call_has_no_effect(session):
    body = post(session, url="http://127.0.0.1:9000/", rotateSecret=True).json()
    assert len(body["secret"]) == 64
    assert body["secondarySecret"] is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        " ",
        "hook",
        "/hook",
        "//127.0.0.1/hook",
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:70/_x",
        "http://",
        "http:///hook",
        "http://user:pass@127.0.0.1/",
        "http://user@127.0.0.1/",
        "http://127.0.0.1/#top",
        "http://127.0.0.1/#",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:port/",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/\r\nX-Evil: 1",
        "http://127.0.0.1\\@example.com/",
        "http://[::1/",
        "http://" + "a" * 2100,
        "http://127.0.0.1/" + "a" * 2032,
        None,
        12,
        True,
        [],
        {"href": "http://127.0.0.1/"},
    ],
)
def test_bad_url_is_400_and_changes_nothing(session, url):
    answer = post(session, url=url)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "VALIDATION_ERROR"
    assert answer.json()["error"]["details"]["fields"]["url"]
    assert not Endpoint.objects.exists()


def test_longest_url_is_accepted(session):
    url = "http://127.0.0.1/" + "a" * (2048 - len("http://127.0.0.1/"))
    assert post(session, url=url).json()["url"] == url


@pytest.mark.parametrize("body", [{}, {"url": "http://127.0.0.1/", "rotateSecret": "yes"}, {"rotateSecret": True}])
def test_bad_body_is_400(session, body):
    assert post(session, **body).status_code == 400
    assert not Endpoint.objects.exists()


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://127.0.0.1/",
        "https://localhost/",
        "https://10.0.0.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://0/",
        "https://0x7f.1/",
        "https://2130706433/",
        "https://no-such-host.invalid/",
    ],
)
def test_private_address_is_400_if_not_allowed(session, settings, url):
    settings.OUTBOUND_ALLOW_PRIVATE = False
    answer = post(session, url=url)
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["fields"]["url"]
    assert not Endpoint.objects.exists()


def test_public_address_is_accepted_if_private_ones_are_not(session, settings):
    settings.OUTBOUND_ALLOW_PRIVATE = False
    assert post(session, url="https://93.184.215.14/hook").status_code == 200


def test_no_endpoint_is_404(session):
    factories.EndpointFactory()  # of another user
    assert session.get(URL).status_code == 404
    for body in ({"enabled": False}, {"enabled": None}, {"other": 1}):
        assert session.patch(URL, body, format="json").status_code == 404
        assert session.post(f"{URL}/test", body, format="json").status_code == 404
    assert session.delete(URL).status_code == 404


def test_enable_and_disable(session, user, endpoint):
    assert session.patch(URL, {"enabled": False}, format="json").json()["enabled"] is False
    assert session.get(URL).json()["enabled"] is False
    assert session.patch(URL, {"enabled": True}, format="json").json()["enabled"] is True


def test_updated_at_is_the_time_of_the_last_change(session):
    def updated(call) -> bool:
        Endpoint.objects.update(updated_at=timezone.now() - timedelta(days=1))
        before = session.get(URL).json()["updatedAt"]
        call()
        return session.get(URL).json()["updatedAt"] > before

    post(session, url="http://127.0.0.1:9000/")
    assert updated(lambda: post(session, url="http://127.0.0.1:9001/"))
    assert not updated(lambda: session.patch(URL, {"enabled": True}, format="json"))
    assert updated(lambda: session.patch(URL, {"enabled": False}, format="json"))


@pytest.mark.parametrize("body", [{}, {"enabled": None}, {"enabled": "false"}, {"enabled": 0}])
def test_bad_change_is_400(session, endpoint, body):
    assert session.patch(URL, body, format="json").status_code == 400
    endpoint.refresh_from_db()
    assert endpoint.enabled


def test_delete_and_create_again(session, user, endpoint):
    post(session, url="http://127.0.0.1:9000/", rotateSecret=True)
    assert session.delete(URL).status_code == 204
    assert session.get(URL).status_code == 404
    assert session.delete(URL).status_code == 404
    gone = Endpoint.objects.get(pk=endpoint.pk)
    assert (gone.secret, gone.secondary_secret) == ("", None)
    created = post(session, url="http://127.0.0.1:9000/").json()
    assert created["id"] != endpoint.pk
    assert created["secret"] != endpoint.secret


@pytest.mark.django_db(transaction=True)
def test_concurrent_first_calls_create_one_endpoint(user):
    barrier, answers = threading.Barrier(8), []

    def call() -> None:
        try:
            client = factories.session_client(user)
            barrier.wait()
            answers.append(post(client, url="http://127.0.0.1:9000/"))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 8
    assert Endpoint.objects.count() == 1
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert [answer.json()["secret"].startswith("•") for answer in answers].count(False) == 1


def test_an_endpoint_that_others_create_and_delete_meanwhile(session, monkeypatch):
    insert = Endpoint.save

    def too_late(endpoint: Endpoint, **options: bool) -> None:
        monkeypatch.setattr(Endpoint, "save", insert)
        raise IntegrityError

    monkeypatch.setattr(Endpoint, "save", too_late)
    made = post(session, url="http://127.0.0.1:9000/")
    assert (made.status_code, made.json()["secret"].startswith("•")) == (200, False)


def test_repetition_with_an_idempotency_key_is_refused_without_the_secret(session, settings):
    first = session.post(URL, {"url": "http://127.0.0.1:9000/"}, format="json", HTTP_IDEMPOTENCY_KEY="one")
    again = session.post(URL, {"url": "http://127.0.0.1:9000/"}, format="json", HTTP_IDEMPOTENCY_KEY="one")
    assert (first.status_code, again.status_code) == (200, 409)
    plain = {"url": "http://127.0.0.1:9001/"}
    update = session.post(URL, plain, format="json", HTTP_IDEMPOTENCY_KEY="two")
    replay = session.post(URL, plain, format="json", HTTP_IDEMPOTENCY_KEY="two")
    assert replay.json() == update.json()
    assert replay["Idempotent-Replayed"] == "true"
    settings.OUTBOUND_ALLOW_PRIVATE = False  # an address that is no longer accepted, like a host that is away
    assert session.post(URL, plain, format="json", HTTP_IDEMPOTENCY_KEY="two").json() == update.json()
    assert session.post(URL, plain, format="json", HTTP_IDEMPOTENCY_KEY="new").status_code == 400
    settings.OUTBOUND_ALLOW_PRIVATE = True
    assert session.post(URL, plain, format="json", HTTP_IDEMPOTENCY_KEY="new").status_code == 200
    rotation = {"url": "http://127.0.0.1:9000/", "rotateSecret": True}
    rotated = session.post(URL, rotation, format="json", HTTP_IDEMPOTENCY_KEY="three")
    assert rotated.json()["secondarySecret"] == first.json()["secret"]
    repeated = session.post(URL, rotation, format="json", HTTP_IDEMPOTENCY_KEY="three")
    assert (repeated.status_code, repeated.json()["error"]["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    kept = b"".join(bytes(body or b"") for body in IdempotencyRecord.objects.values_list("response_body", flat=True))
    for shown in (first, rotated):
        assert shown.json()["secret"].encode() not in kept


# --- secrets that no key can decrypt ----------------------------------------------------------------------------------
@pytest.fixture
def lost(session, settings) -> dict:
    """The answer that created an endpoint whose encryption key was lost later."""
    made = post(session, url="http://127.0.0.1:9000/").json()
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    return made


def test_endpoint_with_a_lost_secret_is_shown(session, lost):
    shown = session.get(URL)
    assert shown.status_code == 200
    assert shown.json() == {**lost, "secret": "••••"}


def test_endpoint_with_a_lost_secret_can_be_changed_and_disabled(session, lost):
    changed = post(session, url="http://127.0.0.1:9001/").json()
    assert (changed["id"], changed["url"], changed["secret"]) == (lost["id"], "http://127.0.0.1:9001/", "••••")
    assert session.patch(URL, {"enabled": False}, format="json").json()["enabled"] is False


def test_change_keeps_a_lost_secret_so_that_a_restored_key_can_decrypt_it(session, settings, user):
    keys = settings.ENCRYPTION_KEYS
    secret = post(session, url="http://127.0.0.1:9000/").json()["secret"]
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    assert post(session, url="http://127.0.0.1:9001/").status_code == 200
    settings.ENCRYPTION_KEYS = keys
    assert Endpoint.objects.get().secret == secret


def test_rotation_replaces_a_lost_secret(session, lost):
    rotated = post(session, url="http://127.0.0.1:9000/", rotateSecret=True).json()
    assert rotated["id"] == lost["id"]
    assert len(rotated["secret"]) == 64
    assert rotated["secondarySecret"] is None
    assert Endpoint.objects.get().secret == rotated["secret"]
    assert session.get(URL).json()["secret"] == "••••" + rotated["secret"][-4:]


def test_endpoint_with_a_lost_secret_can_be_deleted(session, lost):
    assert session.delete(URL).status_code == 204
    assert session.get(URL).status_code == 404
    assert post(session, url="http://127.0.0.1:9000/").json()["id"] != lost["id"]


# --- deliveries ------------------------------------------------------------------------------------------------------
def listing(session, **query):
    response = session.get(URL + "/deliveries", query)
    assert response.status_code == 200, response.content
    return response.json()


def test_deliveries_with_their_attempts(session, user, endpoint, receivers):
    Endpoint.objects.update(url=receivers(answer(500), answer(200)).url)
    delivery = record(user)
    (item,) = listing(session)["items"]
    assert item["attempts"] == []
    deliver()
    (item,) = listing(session)["items"]
    assert item["status"] == "PENDING"
    assert item["nextAttemptAt"] > item["createdAt"]
    pass_time(30)
    deliver()
    (item,) = listing(session)["items"]
    assert {key: item[key] for key in ("id", "eventId", "eventType", "runId", "chatId", "status", "nextAttemptAt")} == {
        "id": delivery.pk,
        "eventId": delivery.event_id,
        "eventType": "agent.started",
        "runId": delivery.run_id,
        "chatId": delivery.chat_id,
        "status": "DELIVERED",
        "nextAttemptAt": None,
    }
    assert item["finishedAt"] is not None
    assert [(a["number"], a["statusCode"], a["error"]) for a in item["attempts"]] == [(1, 500, None), (2, 200, None)]
    assert set(item["attempts"][0]) == {"number", "startedAt", "durationMs", "statusCode", "error"}


def test_deliveries_by_status(session, user, endpoint, receiver):
    delivered = record(user)
    deliver()
    pending = record(user)
    assert [item["id"] for item in listing(session)["items"]] == [pending.pk, delivered.pk]
    assert [item["id"] for item in listing(session, status="DELIVERED")["items"]] == [delivered.pk]
    assert [item["id"] for item in listing(session, status="PENDING")["items"]] == [pending.pk]
    session.patch(URL, {"enabled": False}, format="json")
    deliver()
    assert [item["id"] for item in listing(session, status="DEAD")["items"]] == [pending.pk]


@pytest.mark.parametrize("status", ["", "dead", "X", "\0"])
def test_bad_status_is_400(session, status):
    response = session.get(URL + "/deliveries", {"status": status})
    assert response.status_code == 400
    assert "status" in response.json()["error"]["details"]["fields"]


def test_deliveries_include_earlier_endpoints_of_the_user_and_no_other_users(session, user, endpoint):
    mine = record(user)
    other = factories.EndpointFactory()
    record(other.user)
    session.delete(URL)
    post(session, url="http://127.0.0.1:9000/")
    assert [item["id"] for item in listing(session)["items"]] == [mine.pk]


def test_pages_of_deliveries_have_no_gaps_or_duplicates(session, user, endpoint):
    expected = [record(user).pk for _ in range(7)][::-1]
    found, cursor = [], {}
    while True:
        page = listing(session, limit=3, **cursor)
        found += [item["id"] for item in page["items"]]
        if page["nextCursor"] is None:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert found == expected


def test_list_takes_a_constant_number_of_queries(session, user, endpoint, receiver, django_assert_max_num_queries):
    for _ in range(10):
        record(user)
    deliver()
    assert Delivery.objects.filter(status="DELIVERED").count() == 10
    with django_assert_max_num_queries(3):
        assert len(listing(session)["items"]) == 10


# --- test events -----------------------------------------------------------------------------------------------------
def test_a_test_event_is_delivered_as_any_other_to_the_own_endpoint_alone(session, user, receivers):
    assert session.post(URL + "/test").status_code == 404
    receiver = receivers(answer(500), answer(200))
    secret = post(session, url=receiver.url).json()["secret"]
    for other in (None, factories.UserFactory()):
        factories.EndpointFactory(user=other, extended_events=True)
    assert session.post(URL + "/test", {"x": 1}, format="json").status_code == 400
    created = session.post(URL + "/test", HTTP_IDEMPOTENCY_KEY="k")
    replay = session.post(URL + "/test", HTTP_IDEMPOTENCY_KEY="k")
    assert (created.status_code, replay.json()) == (201, created.json())
    deliver()
    pass_time(30)
    deliver()
    (item,) = listing(session)["items"]
    assert (
        item
        | {"attempts": [], "status": "PENDING", "finishedAt": None}
        | {"nextAttemptAt": created.json()["nextAttemptAt"]}
        == created.json()
    )
    assert (item["eventType"], item["runId"], item["chatId"], item["status"]) == (
        "webhook.test", None, None, "DELIVERED",
    )  # fmt: skip
    assert [attempt["statusCode"] for attempt in item["attempts"]] == [500, 200]
    assert Delivery.objects.filter(event_type="webhook.test").count() == 1
    first, second = receiver.requests
    assert first.body == second.body
    body = json.loads(first.body)
    assert set(body) == {"id", "type", "occurredAt"}
    assert (body["id"], body["type"]) == (item["eventId"], "webhook.test")
    headers = dict(first.headers)
    signing.verify(headers, first.body, secret, int(headers["webhook-timestamp"]))


def test_a_disabled_endpoint_gets_no_test_event(session, endpoint):
    session.patch(URL, {"enabled": False}, format="json")
    refused = session.post(URL + "/test")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "CONFLICT")
    assert not Delivery.objects.exists()
