"""The one-time password of a new installation: it works until a password is chosen, and only opens the page for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import time_machine
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse

from config.kernel import clock
from config.staff import one_time
from config.staff.one_time import OneTimeBackend

pytestmark = pytest.mark.django_db

LOGIN, CHOOSE, INDEX = reverse("admin:login"), reverse("own-password"), reverse("admin:index")
OWN = "correct horse battery"


@pytest.fixture(autouse=True)
def quick(settings):
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def newcomer(db) -> Any:
    return get_user_model()._default_manager.create_superuser("admin", "admin@localhost")


def enter(password: str, client: Client | None = None) -> tuple[Client, int]:
    client = client or Client()
    return client, client.post(LOGIN, {"username": "admin", "password": password}).status_code


def test_it_signs_in_until_a_password_is_chosen(newcomer):
    password = one_time.make(newcomer)
    first, status = enter(password)
    assert status == 302
    first.post(reverse("admin:logout"))
    second, status = enter(password)
    assert status == 302
    third, _ = enter(password)
    assert second.get(INDEX)["Location"] == CHOOSE
    assert second.post(CHOOSE, {"new_password1": OWN, "new_password2": OWN})["Location"] == INDEX
    assert enter(password)[1] == 200
    # The session that another sign-in opened ends, too.
    assert "/login/" in third.get(CHOOSE, follow=True).request["PATH_INFO"]


def test_a_password_of_another_user_is_wrong(newcomer):
    other = get_user_model()._default_manager.create_superuser("other", "other@localhost")
    assert enter(one_time.make(other))[1] == 200
    assert enter(one_time.make(newcomer)[:-1])[1] == 200


def test_every_page_redirects_until_a_new_password_is_set(newcomer):
    client, _ = enter(one_time.make(newcomer))
    for page in (INDEX, reverse("admin:runs_run_changelist"), reverse("admin:auth_user_add")):
        assert client.get(page)["Location"] == CHOOSE
        assert client.post(page, {"username": "eve"})["Location"] == CHOOSE
    assert client.get(CHOOSE).status_code == 200
    for wrong in (("short", "short"), (OWN, "another horse battery"), ("", "")):
        answer = client.post(CHOOSE, {"new_password1": wrong[0], "new_password2": wrong[1]})
        assert answer.status_code == 200
        assert client.get(INDEX)["Location"] == CHOOSE
    assert client.post(CHOOSE, {"new_password1": OWN, "new_password2": OWN})["Location"] == INDEX
    assert client.get(INDEX).status_code == 200
    assert client.get(CHOOSE)["Location"] == INDEX
    newcomer.refresh_from_db()
    assert newcomer.check_password(OWN)
    assert enter(OWN)[1] == 302


def test_it_expires_and_ends_when_a_password_is_set(newcomer):
    password = one_time.make(newcomer)
    with time_machine.travel(clock.now() + timedelta(days=4)):
        assert enter(password)[1] == 200
    newcomer.set_password(OWN)
    newcomer.save()
    assert enter(password)[1] == 200
    assert enter(one_time.make(newcomer))[1] == 200


@pytest.mark.parametrize("fields", [{"is_staff": False}, {"is_active": False}])
def test_it_works_for_active_staff_only(newcomer, fields):
    type(newcomer)._default_manager.filter(pk=newcomer.pk).update(**fields)
    newcomer.refresh_from_db()
    assert OneTimeBackend().authenticate(None, username="admin", password=one_time.make(newcomer)) is None


def test_wrong_guesses_count_as_failed_sign_ins(newcomer, settings):
    settings.AXES_FAILURE_LIMIT = 3
    assert [enter(f"guess-{n}")[1] for n in range(3)] == [200, 200, 429]
    assert enter(one_time.make(newcomer))[1] == 429


def test_the_page_redirects_everyone_else(client):
    assert client.get(CHOOSE)["Location"] == INDEX
