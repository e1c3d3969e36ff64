"""Sessions of staff end after a time without requests, and some time after the sign-in."""

from datetime import timedelta

import pytest
import time_machine
from django.conf import settings as service
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from config.kernel import clock
from tests import factories

pytestmark = pytest.mark.django_db
INDEX = reverse("admin:index")


@pytest.fixture
def staff(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(clock, "now", timezone.now)  # the database's clock does not travel
    client = Client()
    client.force_login(factories.UserFactory(is_staff=True, is_superuser=True))
    return client


def signed_in(client: Client) -> bool:
    return client.get(INDEX).status_code == 200


def test_a_request_renews_the_idle_time(staff):
    begun = clock.now()
    for minutes in (0, 50, 100):
        with time_machine.travel(begun + timedelta(minutes=minutes)):
            assert signed_in(staff)
    with time_machine.travel(begun + timedelta(minutes=161)):
        assert not signed_in(staff)


def test_a_session_ends_some_hours_after_the_sign_in(staff):
    begun = clock.now()
    for minutes in range(0, service.ADMIN_SESSION_HOURS * 60, 50):
        with time_machine.travel(begun + timedelta(minutes=minutes)):
            assert signed_in(staff)
    with time_machine.travel(begun + timedelta(hours=service.ADMIN_SESSION_HOURS, minutes=1)):
        assert not signed_in(staff)
