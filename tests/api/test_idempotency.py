"""The Idempotency-Key header (docs/api.md)."""

import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import connection

from config.api import idempotency
from config.api.models import IdempotencyRecord
from config.kernel import clock
from tests import factories
from tests.api import urls
from tests.threads import side_by_side

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.api.urls")]


@pytest.fixture(autouse=True)
def reset(seeded):
    Group.objects.all().delete()  # The tests count groups, so the staff roles must go.
    urls.entered.clear()
    urls.may_continue.set()
    yield
    urls.may_continue.set()


def post(client, name="x", key: str | None = "k1", path="/api/v1/groups"):
    extra = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}
    return client.post(path, {"name": name}, format="json", **extra)


def code(response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_repeated_request_gets_the_same_bytes(session):
    first, second = post(session), post(session)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert second["Content-Type"] == first["Content-Type"]
    assert "Idempotent-Replayed" not in first
    assert second["Idempotent-Replayed"] == "true"
    assert Group.objects.count() == 1


def test_without_a_key_every_request_creates(session):
    post(session, key=None)
    post(session, key=None)
    assert Group.objects.count() == 2
    assert not IdempotencyRecord.objects.exists()


def test_the_same_key_with_another_body_is_refused(session):
    post(session)
    assert code(post(session, name="y")) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert Group.objects.count() == 1


def test_a_key_is_bound_to_the_exact_body_and_path(session):
    post(session)
    spaced = session.generic(
        "POST", "/api/v1/groups", b'{ "name": "x" }', "application/json", HTTP_IDEMPOTENCY_KEY="k1"
    )
    assert code(spaced) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert code(post(session, path="/api/v1/groups?q=1")) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert code(post(session, path="/api/v1/secret-groups")) == (409, "IDEMPOTENCY_KEY_REUSED")


def test_each_user_surface_and_key_is_separate(user, session):
    clients = [session, factories.public_client(user), factories.session_client(factories.UserFactory())]
    paths = ["/api/v1/groups", "/api/public/v1/groups", "/api/v1/groups"]
    for client, path in zip(clients, paths, strict=True):
        assert "Idempotent-Replayed" not in post(client, path=path)
    post(session, key="k2")
    assert Group.objects.count() == 4


def test_two_api_keys_of_a_user_share_idempotency_keys(user):
    post(factories.public_client(user), path="/api/public/v1/groups")
    assert "Idempotent-Replayed" in post(factories.public_client(user), path="/api/public/v1/groups")


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "\x7f", "ключ", "\xff"])
def test_a_malformed_key_is_400(session, key):
    assert code(post(session, key=key)) == (400, "VALIDATION_ERROR")
    assert not Group.objects.exists()


@pytest.mark.parametrize("key", ["x", "x" * 255, "with spaces ~!", "../%00"])
def test_printable_keys_are_accepted(session, key):
    assert post(session, key=key).status_code == 201
    assert post(session, key=key)["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(("name", "status"), [("refuse", 409), ("crash", 500)])
def test_a_failed_request_stores_nothing_and_releases_its_key(session, name, status):
    assert post(session, name=name).status_code == status
    assert not Group.objects.exists()
    assert not IdempotencyRecord.objects.exists()
    assert post(session).status_code == 201


def test_an_invalid_body_uses_no_key(session):
    bad = session.generic("POST", "/api/v1/groups", b"{", "application/json", HTTP_IDEMPOTENCY_KEY="k1")
    assert bad.status_code == 400
    assert post(session).status_code == 201


def test_an_answer_with_a_secret_is_not_stored(session):
    assert post(session, path="/api/v1/secret-groups").status_code == 201
    assert code(post(session, path="/api/v1/secret-groups")) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert IdempotencyRecord.objects.get().response_body is None
    assert Group.objects.count() == 1


def test_other_actions_ignore_the_header(session):
    for _ in range(2):
        response = session.put("/api/v1/groups", {"a": 1}, format="json", HTTP_IDEMPOTENCY_KEY="k1")
        assert "Idempotent-Replayed" not in response
    assert not IdempotencyRecord.objects.exists()


def test_a_request_in_flight_has_its_own_error(session, user):
    idempotency.claim(user.pk, "session", "k1", "f" * 64)
    record = IdempotencyRecord.objects.get()
    assert code(post(session)) == (409, "IDEMPOTENCY_KEY_REUSED")  # in flight, but for another body
    post(session, key="k2")
    IdempotencyRecord.objects.filter(pk=record.pk).update(
        fingerprint=IdempotencyRecord.objects.get(key="k2").fingerprint
    )
    assert code(post(session)) == (409, "IDEMPOTENCY_KEY_IN_USE")


def test_the_claim_of_a_crashed_request_is_taken_over(session, user):
    idempotency.claim(user.pk, "session", "k1", "f" * 64)
    age(seconds=idempotency.IDEMPOTENCY_LOCK_SECONDS + 1)
    assert post(session).status_code == 201
    assert post(session)["Idempotent-Replayed"] == "true"


def test_a_crashed_claim_that_another_request_took_over_first_is_409(session, user, monkeypatch):
    idempotency.claim(user.pk, "session", "k1", "f" * 64)
    age(seconds=idempotency.IDEMPOTENCY_LOCK_SECONDS + 1)

    def overtaken(**by: float) -> timedelta:
        IdempotencyRecord.objects.update(claim="another", claimed_at=clock.now())
        return timedelta(**by)

    monkeypatch.setattr(idempotency, "timedelta", overtaken)  # between reading the row and taking it over
    assert post(session).status_code == 409
    assert not Group.objects.exists()
    assert IdempotencyRecord.objects.get().claim == "another"


def test_a_request_rolls_back_if_its_claim_was_taken_over(session, monkeypatch):
    keep = idempotency.keep

    def overtaken(record, *args):
        IdempotencyRecord.objects.filter(pk=record.pk).update(claim="another")
        keep(record, *args)

    monkeypatch.setattr(idempotency, "keep", overtaken)
    assert code(post(session)) == (409, "IDEMPOTENCY_KEY_IN_USE")
    assert not Group.objects.exists()


def test_an_expired_answer_is_not_used_even_if_not_pruned(session):
    post(session)
    age(hours=idempotency.IDEMPOTENCY_HOURS, seconds=-30)
    assert post(session)["Idempotent-Replayed"] == "true"
    age(seconds=60)
    assert "Idempotent-Replayed" not in post(session, name="another body")
    assert Group.objects.count() == 2


def test_old_records_are_pruned_in_batches(session, monkeypatch):
    monkeypatch.setattr(idempotency, "PRUNE_BATCH", 2)
    for number in range(5):
        post(session, key=f"old{number}")
    age(hours=idempotency.IDEMPOTENCY_HOURS, seconds=1)
    post(session, key="new")
    assert idempotency.prune() == 5
    assert [record.key for record in IdempotencyRecord.objects.all()] == ["new"]


def test_the_number_of_queries(session, django_assert_num_queries):
    clock.sync()  # on PostgreSQL the clock sometimes makes a query
    with django_assert_num_queries(3):
        post(session, key=None)
    with django_assert_num_queries(3 + 3 + 4):  # find, insert, store; begin and commit of two transactions
        post(session)
    with django_assert_num_queries(2):
        post(session)


@pytest.mark.django_db(transaction=True)
def test_twenty_concurrent_requests_create_one_object():
    client = factories.session_client(factories.UserFactory())
    answers = side_by_side(20, lambda _: post(client))
    assert Group.objects.count() == 1
    created = {answer.content for answer in answers if answer.status_code == 201}
    assert len(created) == 1
    others = [answer for answer in answers if answer.status_code != 201]
    assert {code(answer) for answer in others} <= {(409, "IDEMPOTENCY_KEY_IN_USE")}
    assert sum("Idempotent-Replayed" not in answer for answer in answers if answer.status_code == 201) == 1
    assert post(client).content in created


@pytest.mark.django_db(transaction=True)
def test_one_of_many_concurrent_requests_takes_over_a_crashed_claim():
    user = factories.UserFactory()
    client = factories.session_client(user)
    idempotency.claim(user.pk, "session", "k1", "f" * 64)
    age(seconds=idempotency.IDEMPOTENCY_LOCK_SECONDS + 1)
    answers = side_by_side(10, lambda _: post(client))
    assert Group.objects.count() == 1
    assert {answer.status_code for answer in answers} <= {201, 409}


@pytest.mark.django_db(transaction=True)
def test_a_second_request_does_not_wait_for_the_first():
    """The claim is committed before the work begins, so other requests see it (also on SQLite)."""
    client = factories.session_client(factories.UserFactory())
    urls.may_continue.clear()
    answers = []

    def first() -> None:
        answers.append(post(client))
        connection.close()

    thread = threading.Thread(target=first)
    thread.start()
    assert urls.entered.wait(30)
    assert code(post(client)) == (409, "IDEMPOTENCY_KEY_IN_USE")
    urls.may_continue.set()
    thread.join()
    assert answers[0].status_code == 201
    assert post(client)["Idempotent-Replayed"] == "true"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_before_the_commit_leaves_no_object(monkeypatch, stored):
    """The object and its stored answer are one transaction. The claim of the crashed request times out."""
    client = factories.session_client(factories.UserFactory())
    keep = idempotency.keep

    def die(*args):
        if stored:
            keep(*args)
        raise SystemExit

    monkeypatch.setattr(idempotency, "keep", die)
    # A killed process does not release its claim.
    monkeypatch.setattr(idempotency, "released_after_failure", nullcontext)
    with pytest.raises(SystemExit):
        post(client)
    monkeypatch.undo()
    assert not Group.objects.exists()
    assert IdempotencyRecord.objects.get().response_status is None
    assert code(post(client)) == (409, "IDEMPOTENCY_KEY_IN_USE")
    age(seconds=idempotency.IDEMPOTENCY_LOCK_SECONDS + 1)
    assert post(client).status_code == 201


def age(**by) -> None:
    for record in IdempotencyRecord.objects.all():
        record.claimed_at -= timedelta(**by)
        record.save(update_fields=["claimed_at"])
