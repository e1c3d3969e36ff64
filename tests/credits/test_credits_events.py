"""What the installation endpoint is told of users' credits."""

import json
import threading
from decimal import Decimal
from typing import Any

import pytest

from credits import grants, ledger
from credits.models import Account
from tests import factories
from tests.credits.helpers import CREDIT, clerk, fund, place, spend, turn
from tests.credits.test_concurrency import side_by_side
from webhooks import services
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db


@pytest.fixture
def endpoint(db):
    return services.register(services.INSTALLATION, "http://127.0.0.1:9/", rotate=False, extended=True)[0]


def told(*names: str) -> list[dict[str, Any]]:
    """The fields of each event, without its own id and time."""
    found = Delivery.objects.filter(event_type__in=names).order_by("created_at", "pk")
    bodies = [json.loads(delivery.body, parse_float=Decimal) for delivery in found]
    for body in bodies:
        assert list(body)[:3] == ["id", "type", "occurredAt"]
        del body["id"], body["type"], body["occurredAt"]
    return bodies


def lows() -> list[tuple[Any, Any]]:
    ledger.report_low()
    return [(body["threshold"], body["available"]) for body in told("credits.low")]


def test_each_grant_is_told_once(endpoint):
    user = factories.UserFactory(username="auth0|4711")
    for _ in range(2):
        ledger.open_account(user)
        entry, _ = grants.grant(user.pk, 12_500_000, reference="pay_1", reason="x", expires_at=None)
    by_sign_up, by_backend = told("credits.granted")
    assert by_sign_up | {"ledgerId": ""} == {"ledgerId": "", "reference": None, "amount": 100, "userId": "auth0|4711"}
    assert by_backend == {"ledgerId": entry.pk, "reference": "pay_1", "amount": Decimal("12.5"), "userId": "auth0|4711"}


def test_a_users_own_endpoint_is_told_nothing(user):
    factories.EndpointFactory(user=user, extended_events=True)
    ledger.grant(user.pk, 5, cause="x")
    spend(user, 99 * CREDIT)
    ledger.report_low()
    assert not Delivery.objects.exists()


def test_each_crossing_of_a_threshold_is_told_once(endpoint, user):
    spend(user, 80 * CREDIT)  # 20 left: not below
    assert lows() == []
    turn(user, 1)
    assert lows() == [(20, Decimal("19.999999"))]
    spend(user, 5 * CREDIT)
    assert lows() == [(20, Decimal("19.999999"))]
    spend(user, 10 * CREDIT)
    assert lows()[1:] == [(5, Decimal("4.999999"))]
    ledger.grant(user.pk, 50 * CREDIT, cause="x")
    assert len(lows()) == 2
    ledger.adjust(user.pk, -50 * CREDIT, reason="Fine", staff=clerk())
    assert lows()[2:] == [(20, Decimal("4.999999")), (5, Decimal("4.999999"))]
    assert [body["userId"] for body in told("credits.low")] == [user.username] * 4
    assert lows() == lows()


def test_a_hold_is_no_spending(endpoint, user):
    fund(user, 25 * CREDIT)
    hold = place(user, 24 * CREDIT)
    assert lows() == []
    ledger.capture(hold, 6 * CREDIT)
    assert lows() == [(20, 19)]


def test_without_thresholds_nothing_is_told(endpoint, user, settings):
    settings.CREDITS_LOW_THRESHOLDS = ""
    spend(user, 99 * CREDIT)
    assert lows() == []


@pytest.mark.django_db(transaction=True)
def test_parallel_charges_and_reports_tell_each_crossing_once(endpoint):
    user = factories.UserFactory()
    lock = threading.Lock()

    def call(number: int) -> None:
        spend(user, 12 * CREDIT)
        with lock:
            ledger.report_low()

    side_by_side(8, call)
    assert sorted(threshold for threshold, _ in lows()) == [5, 20]
    assert Account.objects.get(pk=user.pk).low_due == 0
