"""Tests of the admin pages of webhooks: they are read-only and show no secrets."""

import json
import re

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse
from django.utils import timezone

from tests import factories
from tests.webhooks.conftest import deliver, record
from tests.webhooks.receiver import answer
from webhooks.models import Endpoint

pytestmark = pytest.mark.django_db


@pytest.fixture
def staff(client):
    person = factories.UserFactory(is_staff=True, is_superuser=True)
    client.force_login(person)
    return client


@pytest.fixture
def delivered(user, endpoint):
    Endpoint.objects.update(url=endpoint.url + "?token=hush", secondary_secret="ab" * 32)
    delivery = record(user)
    deliver()
    return delivery


def pages(endpoint, delivery):
    yield reverse("admin:webhooks_endpoint_changelist")
    yield reverse("admin:webhooks_endpoint_change", args=[endpoint.pk])
    yield reverse("admin:webhooks_delivery_changelist") + "?status__exact=DELIVERED"
    yield reverse("admin:webhooks_delivery_change", args=[delivery.pk])


def test_no_page_shows_a_secret(staff, endpoint, delivered):
    for page in pages(endpoint, delivered):
        response = staff.get(page)
        assert response.status_code == 200, page
        for secret in (endpoint.secret, "ab" * 32, "hush"):
            assert secret not in response.content.decode()
    listing = staff.get(reverse("admin:webhooks_delivery_changelist") + "?status__exact=DEAD")
    assert delivered.pk not in listing.content.decode()


def test_answer_of_a_receiver_is_escaped(staff, user, endpoint, receivers):
    Endpoint.objects.update(url=receivers(answer(500, b"<script>alert(1)</script>")).url)
    delivery = record(user)
    deliver()
    *_, detail = pages(endpoint, delivery)
    content = staff.get(detail).content.decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in content
    assert "<script>alert(1)" not in content


def test_pages_are_read_only(staff, endpoint, delivered):
    for kind, key in (("endpoint", endpoint.pk), ("delivery", delivered.pk)):
        assert staff.get(reverse(f"admin:webhooks_{kind}_add")).status_code == 403
        assert staff.post(reverse(f"admin:webhooks_{kind}_change", args=[key]), {}).status_code == 403
        assert staff.post(reverse(f"admin:webhooks_{kind}_delete", args=[key]), {"post": "yes"}).status_code == 403


def test_disable_marks_pending_deliveries_dead(staff, user, endpoint):
    pending = record(user)
    body = {"_selected_action": [endpoint.pk], "step": "confirm"}
    assert staff.post(reverse("admin:webhooks_endpoint_do", args=["disable"]), body).status_code == 302
    deliver()
    endpoint.refresh_from_db()
    pending.refresh_from_db()
    assert (endpoint.enabled, pending.status) == (False, "DEAD")


def test_staff_send_a_test_event_to_one_endpoint(staff, endpoint, receiver):
    other = factories.EndpointFactory(user=None)
    page = reverse("admin:webhooks_endpoint_do_one", args=[endpoint.pk, "test"])
    assert "webhook.test" in staff.get(page).content.decode()
    staff.post(page, {"step": "confirm"})
    deliver()
    assert [json.loads(request.body)["type"] for request in receiver.requests] == ["webhook.test"]
    assert not other.deliveries.exists()
    staff.post(reverse("admin:webhooks_endpoint_do_one", args=[other.pk, "test"]), {"step": "confirm"})
    assert other.deliveries.get().event_type == "webhook.test"
    Endpoint.objects.filter(pk=other.pk).update(enabled=False)
    staff.post(reverse("admin:webhooks_endpoint_do_one", args=[other.pk, "test"]), {"step": "confirm"})
    assert other.deliveries.count() == 1


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        ({}, "not used yet"),
        ({"failing": True}, "failing"),
        ({"failing": False}, "works"),
        ({"failing": True, "enabled": False}, "disabled"),
        ({"enabled": False, "deleted_at": timezone.now()}, "deleted"),
    ],
)
def test_an_endpoint_has_one_state(staff, user, columns, state):
    factories.EndpointFactory(user=user, **columns)
    listed = staff.get(reverse("admin:webhooks_endpoint_changelist")).content.decode()
    assert {
        name for name in Endpoint.STATES if f">{name}<" in re.sub(r">\s+|\s+<", lambda m: m[0].strip(), listed)
    } == {state}


def test_disable_needs_the_permission(client, endpoint):
    person = factories.UserFactory(is_staff=True)
    person.user_permissions.add(Permission.objects.get(codename="view_endpoint"))
    client.force_login(person)
    body = {"_selected_action": [endpoint.pk], "step": "confirm"}
    assert client.post(reverse("admin:webhooks_endpoint_do", args=["disable"]), body).status_code == 403
    endpoint.refresh_from_db()
    assert endpoint.enabled
