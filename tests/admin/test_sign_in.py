"""Sign-in attempts are limited by client address, and forged headers do not bypass the limit."""

import pytest
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from tests import factories

pytestmark = pytest.mark.django_db

LOGIN = reverse("admin:login")
PASSWORD = "correct horse battery"


@pytest.fixture(autouse=True)
def few(settings):
    # axes reads its own settings. Its limit includes the current attempt, so two attempts may fail.
    settings.AXES_FAILURE_LIMIT = 3
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def person(db):
    person = factories.UserFactory(username="ada", is_staff=True)
    person.set_password(PASSWORD)
    person.save()
    return person


def attempt(password: str, address: str = "203.0.113.7", username: str = "ada", **headers: str) -> int:
    body = {"username": username, "password": password}
    return Client(REMOTE_ADDR=address).post(LOGIN, body, headers=headers).status_code


def test_a_sign_in_leads_to_the_admin(person):
    assert Client().post(LOGIN, {"username": "ada", "password": PASSWORD})["Location"] == reverse("admin:index")


def test_too_many_wrong_passwords_lock_the_address(person):
    assert [attempt("wrong") for _ in range(4)] == [200, 200, 429, 429]
    assert attempt(PASSWORD) == 429
    assert attempt(PASSWORD, address="203.0.113.8") == 302


def test_concurrent_attempts_have_the_same_limit_as_sequential_ones(person, monkeypatch):
    looked_at = []

    def look(*args, **credentials):
        looked_at.append(credentials["password"])
        # Another attempt arrives while this one is checked.
        if len(looked_at) < 10:
            attempt("wrong")

    monkeypatch.setattr("django.contrib.auth.backends.ModelBackend.authenticate", look)
    attempt("wrong")
    assert len(looked_at) == 2
    assert attempt(PASSWORD) == 429


def test_right_passwords_are_not_counted(person):
    assert [attempt(PASSWORD) for _ in range(5)] == [302] * 5
    assert [attempt(word) for word in ("wrong", PASSWORD, "wrong", PASSWORD)] == [200, 302, 200, 429]


def test_attempts_with_other_usernames_and_user_agents_count(person):
    answers = [attempt("wrong", username=f"user{n}", user_agent=f"browser {n}") for n in range(4)]
    assert answers == [200, 200, 429, 429]
    assert attempt(PASSWORD, user_agent="another") == 429


def test_forwarding_headers_of_untrusted_clients_are_ignored(person):
    for number in range(4):
        attempt("wrong", x_forwarded_for=f"198.51.100.{number}", x_real_ip=f"198.51.100.{number}")
    assert attempt(PASSWORD, x_forwarded_for="198.51.100.99") == 429
    # A client cannot lock another address by putting it into the header.
    assert attempt(PASSWORD, address="198.51.100.1") == 302


def test_behind_a_proxy_the_address_that_the_proxy_saw_counts(person, settings):
    settings.TRUSTED_PROXIES = 1
    for number in range(4):
        attempt("wrong", address="10.0.0.1", x_forwarded_for=f"198.51.100.{number}, 203.0.113.7")
    assert attempt(PASSWORD, address="10.0.0.1", x_forwarded_for="198.51.100.77, 203.0.113.7") == 429
    assert attempt(PASSWORD, address="10.0.0.1", x_forwarded_for="203.0.113.7, 203.0.113.9") == 302


def test_ipv6_addresses_of_one_network_count_together(person):
    assert [attempt("wrong", address=f"2001:db8:1:2::{n}") for n in range(3)][-1] == 429
    assert attempt(PASSWORD, address="2001:db8:1:2:ffff::1") == 429
    assert attempt(PASSWORD, address="2001:db8:1:3::1") == 302


@pytest.mark.parametrize("address", ["", "unix:", "not an address"])
def test_without_an_address_attempts_are_counted_together(person, address):
    assert [attempt("wrong", address=address) for _ in range(3)][-1] == 429


def test_a_lock_ends_after_its_time_or_by_the_command(person, settings):
    for _ in range(4):
        attempt("wrong")
    answer = Client(REMOTE_ADDR="203.0.113.7").post(LOGIN, {"username": "ada", "password": PASSWORD})
    assert (answer.status_code, answer["Retry-After"]) == (429, "900")
    assert "15 minutes" in answer.content.decode()
    call_command("axes_reset_ip", "203.0.113.7")
    assert attempt(PASSWORD) == 302


def test_old_attempts_do_not_count(person, settings):
    from datetime import timedelta

    from axes.models import AccessAttempt
    from django.db.models import F

    for _ in range(4):
        attempt("wrong")
    AccessAttempt.objects.update(attempt_time=F("attempt_time") - timedelta(seconds=901))
    assert attempt(PASSWORD) == 302
    assert not AccessAttempt.objects.exists()


def test_no_password_is_stored_or_logged(person, caplog):
    from axes.models import AccessAttempt

    attempt("hush-hush", username="hush-name")
    assert "hush" not in caplog.text
    stored = AccessAttempt.objects.values().get()
    assert "hush-hush" not in str(stored)


def test_unusual_input_causes_no_server_error(person):
    for username in ("\0", "x" * 10_000, "\ud800"):
        assert attempt("x\0y", username=username.encode(errors="replace").decode()) == 200
