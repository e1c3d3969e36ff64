"""Grants that expire."""

from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.kernel import clock
from credits import ledger
from credits.grants import expire_all, expire_grants, unspent
from credits.models import LedgerEntry, PendingExpiry
from credits.reconcile import drift
from tests.credits.helpers import Clock, clerk, fund, place, rows, spend, state, stop_clock, turn
from tests.credits.test_concurrency import side_by_side
from tests.factories import UserFactory
from tests.plans import plans_of
from tests.tiers import examples

HOUR = timedelta(hours=1)


@pytest.fixture
def now(monkeypatch, user) -> Clock:
    fund(user, 0)
    return stop_clock(monkeypatch, clock.now())


def give(user, amount: int, expires_at: datetime | None = None) -> LedgerEntry:
    """The amount identifies the grant, so use each amount once."""
    return ledger.grant(user.pk, amount, cause=f"{user.pk}:{amount}", expires_at=expires_at)


@pytest.mark.django_db
class TestExpiry:
    @pytest.fixture(autouse=True)
    def _nothing_drifts(self, db):
        yield
        assert list(drift()) == []

    def test_the_unspent_part_is_taken_back_at_the_expiry(self, user, now):
        give(user, 10, now.now + HOUR)
        give(user, 100)
        spend(user, 4)
        now.now += HOUR - timedelta(microseconds=1)
        assert sum(expire_grants()) == 0
        now.now += timedelta(microseconds=1)
        assert sum(expire_grants()) == 6
        assert state(user) == (100, 0)
        assert ("EXPIRY", 6) in rows(user)
        assert sum(expire_grants()) == 0
        assert not PendingExpiry.objects.exists()

    def test_what_will_expire_needs_no_query_for_each_grant(self, session, user, now, django_assert_max_num_queries):
        """Credits of each day for a month: no statement compares each row with each grant."""
        for day in range(30):
            give(user, 10 + day, now.now + HOUR)
            spend(user, 3)
            now.now += HOUR
            assert sum(expire_grants()) == 7 + day
        give(user, 99, now.now + HOUR)
        with django_assert_max_num_queries(10) as made:
            expiring = session.get("/api/v1/me/credits").json()["expiring"]
        assert [row["amount"] for row in expiring] == ["0.000099"]
        assert max(query["sql"].count("WHEN") for query in made) < 15

    @pytest.mark.services
    def test_credits_and_old_balances_are_found_without_reading_all_charges(self, session, user, now):
        """One grant is older than all charges, one lies between those of a day."""
        now.now = (now.now + 24 * HOUR).replace(hour=0)
        give(user, 1000, now.now + 90 * HOUR)
        for hour in range(96):
            spend(user, 3)
            now.now += HOUR / 2
            if hour == 50:
                give(user, 50, now.now + 120 * HOUR)
        with plans_of("credits_ledgerentry") as plans:
            expiring = session.get("/api/v1/me/credits").json()["expiring"]
        assert [row["amount"] for row in expiring] == ["0.000712", "0.00005"]
        assert plans.texts
        assert plans.rows < 96
        ledger, cursor = "/api/v1/me/credits/ledger", ""
        while cursor is not None:
            with plans_of("credits_ledgerentry") as plans:
                page = session.get(ledger, {"limit": 10} | ({"cursor": cursor} if cursor else {})).json()
            cursor = page["nextCursor"]
        assert page["items"][-3]["balanceAfter"] == "0.001"
        assert plans.texts
        assert plans.rows < 96

    def test_a_spent_grant_makes_no_expiry_row(self, session, user, now):
        give(user, 10, now.now + HOUR)
        spend(user, 10)
        assert session.get("/api/v1/me/credits").json()["expiring"] == []
        now.now += HOUR
        assert sum(expire_grants()) == 0
        assert "EXPIRY" not in dict(rows(user))
        assert not PendingExpiry.objects.exists()

    def test_the_grant_that_expires_first_is_spent_first(self, user, now):
        give(user, 100)
        late = give(user, 50, now.now + 3 * HOUR)
        now.now += timedelta(seconds=1)
        soon = give(user, 20, now.now + HOUR)
        turn(user, 25)
        assert unspent(user.pk) == {late.pk: 45, soon.pk: 0}

    def test_with_equal_expiry_the_oldest_grant_is_spent_first(self, user, now):
        end = now.now + HOUR
        old = give(user, 20, end)
        now.now += timedelta(seconds=1)
        new = give(user, 30, end)
        ledger.adjust(user.pk, -5, reason="r", staff=clerk())
        assert unspent(user.pk) == {old.pk: 15, new.pk: 30}

    def test_earlier_spending_does_not_reduce_a_grant(self, user, now):
        late = give(user, 50, now.now + 3 * HOUR)
        spend(user, 30)
        now.now += timedelta(seconds=1)
        soon = give(user, 40, now.now + HOUR)
        assert unspent(user.pk) == {late.pk: 20, soon.pk: 40}

    def test_what_was_spent_on_an_earlier_day_counts_once(self, user, now):
        first = give(user, 10, now.now + 60 * HOUR)
        spend(user, 6)
        now.now += 30 * HOUR
        second = give(user, 11, now.now + 60 * HOUR)
        assert unspent(user.pk) == {first.pk: 4, second.pk: 11}

    def test_a_grant_pays_a_debt_first(self, user, now):
        ledger.adjust(user.pk, -30, reason="r", staff=clerk())
        now.now += timedelta(seconds=1)
        grant = give(user, 40, now.now + HOUR)
        assert unspent(user.pk) == {grant.pk: 10}
        now.now += HOUR
        assert sum(expire_grants()) == 10
        assert state(user) == (0, 0)

    def test_held_credits_expire_when_the_hold_is_released(self, user, now):
        give(user, 10, now.now + HOUR)
        kept, released = place(user, 3), place(user, 2)
        now.now += HOUR
        assert sum(expire_grants()) == 5
        assert state(user) == (5, 5)
        assert sum(expire_grants()) == 0
        ledger.capture(kept, 3)
        ledger.capture(released, 0)
        assert ledger.account_for(user.pk).available == 2
        assert sum(expire_grants()) == 2
        assert state(user) == (0, 0)
        assert not PendingExpiry.objects.exists()

    def test_held_credits_stay_when_several_grants_expire_together(self, user, now):
        for amount in (10, 11):
            give(user, amount, now.now + HOUR)
        place(user, 5)
        now.now += HOUR
        assert sum(expire_grants()) == 16
        assert state(user) == (5, 5)

    def test_repeating_a_grant_does_not_renew_it(self, user, now):
        end = now.now + HOUR
        give(user, 10, end)
        now.now = end
        sum(expire_grants())
        give(user, 10, end)
        assert sum(expire_grants()) == 0
        assert state(user) == (0, 0)

    def test_the_task_reaches_every_account(self, user, now, monkeypatch):
        monkeypatch.setattr("credits.grants.ACCOUNTS_BATCH", 2)
        users = [user, *(UserFactory() for _ in range(4))]
        for each in users[1:]:
            fund(each, 0)
        now.now += timedelta(seconds=1)
        for each in users:
            give(each, 10, now.now + HOUR)
        now.now += HOUR
        expire_all()
        assert [state(each) for each in users] == [(0, 0)] * 5

    def test_expiry_does_not_count_as_usage(self, session, user, now):
        give(user, 10, now.now + HOUR)
        now.now += HOUR
        sum(expire_grants())
        assert session.get("/api/v1/me/credits/usage-summary").json()["recordsAll"] == 0


@pytest.mark.django_db
@settings(max_examples=examples(25), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("grant"), st.integers(1, 30), st.integers(1, 6)),
            st.tuples(st.just("keep"), st.integers(1, 30), st.just(0)),
            st.tuples(st.just("spend"), st.integers(1, 30), st.just(0)),
            st.tuples(st.just("wait"), st.integers(1, 2), st.just(0)),
        ),
        max_size=25,
    )
)
def test_the_unspent_parts_agree_with_a_model(steps, monkeypatch):
    """The model keeps a list of grants and subtracts each spending from them in order."""
    with monkeypatch.context() as patch:
        travel = stop_clock(patch, clock.now())
        user = UserFactory()
        fund(user, 0)
        begin = travel.now
        lots: dict[str, tuple[int, int, int]] = {}  # id → (expires after hours, made as number, left)
        other = 0  # credits that never expire; negative: a debt
        hours = 0
        for number, (kind, amount, after) in enumerate(steps):
            travel.now += timedelta(seconds=1)
            if kind == "grant":
                end = begin + (hours + after) * HOUR
                grant = ledger.grant(user.pk, amount, cause=f"{user.pk}:{number}", expires_at=end)
                paid = min(amount, max(0, -other))
                other += paid
                lots[grant.pk] = (hours + after, number, amount - paid)
            elif kind == "keep":
                ledger.grant(user.pk, amount, cause=f"{user.pk}:{number}")
                other += amount
            elif kind == "spend":
                # Also by an adjustment: only staff can take an account below zero.
                if number % 2 and amount <= other + sum(left for _, _, left in lots.values()):
                    turn(user, amount)
                else:
                    ledger.adjust(user.pk, -amount, reason="r", staff=clerk())
                for key, (end_hour, made, left) in sorted(lots.items(), key=lambda lot: lot[1][:2]):
                    used = min(left, amount)
                    lots[key] = (end_hour, made, left - used)
                    amount -= used
                other -= amount
            else:
                hours += amount
                travel.now = begin + hours * HOUR + timedelta(seconds=number + 1)
                due = [key for key, (end_hour, _, _) in lots.items() if end_hour <= hours]
                assert sum(expire_grants()) == sum(lots.pop(key)[2] for key in due)
            assert {key: left for key, left in unspent(user.pk).items() if left} == {
                key: left for key, (_, _, left) in lots.items() if left
            }
            assert state(user) == (other + sum(left for _, _, left in lots.values()), 0)
        for pending in PendingExpiry.objects.filter(account_id=user.pk):
            pending.delete()  # the next example starts at the same time


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("threads", [4, pytest.param(16, marks=pytest.mark.services)])
def test_concurrent_expiries_take_back_once(threads):
    users = [UserFactory() for _ in range(3)]
    for user in users:
        fund(user, 5)
        give(user, 10, clock.now())
    side_by_side(threads, lambda _: sum(expire_grants()))
    assert [state(user) for user in users] == [(5, 0)] * 3
    assert list(drift()) == []
