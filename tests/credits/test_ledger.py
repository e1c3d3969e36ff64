"""The effect of each movement on the account and the ledger."""

import contextlib
import logging
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import IntegrityError, transaction

from config.database.writes import Writes
from config.kernel import clock
from config.kernel.errors import Conflict, NotFound, ValidationFailed
from config.kernel.money import MAX_MICRO
from credits import ledger, sums
from credits.models import Account, EntryType, LedgerEntry, PendingExpiry, credits_added
from credits.reconcile import drift
from tests import factories
from tests.credits.helpers import CREDIT, clerk, fund, place, release_run, rows, spend, state, turn
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _nothing_drifts(db):
    yield
    assert list(drift()) == []


class TestAccounts:
    def test_a_new_user_gets_the_signup_credits_once(self, user):
        assert state(user) == (100 * CREDIT, 0)
        ledger.open_account(user)
        user.save()
        assert state(user) == (100 * CREDIT, 0)
        assert LedgerEntry.objects.get(account_id=user.pk).cause == f"signup:{user.pk}"

    def test_staff_get_no_signup_credits(self):
        for status in ({"is_staff": True}, {"is_superuser": True}):
            assert ledger.account_for(factories.UserFactory(**status).pk).balance == 0

    def test_signup_credits_are_a_setting(self, settings):
        settings.SIGNUP_CREDITS = "2.5"
        assert state(UserFactory()) == (2_500_000, 0)
        settings.SIGNUP_CREDITS = "0"
        assert state(UserFactory()) == (0, 0)

    def test_a_user_without_an_account_gets_one_on_demand(self, user):
        older = _user_without_account()
        assert ledger.account_for(older.pk).available == 100 * CREDIT
        older = _user_without_account()
        place(older, 30 * CREDIT)
        assert state(older) == (100 * CREDIT, 30 * CREDIT)
        older = _user_without_account()
        with pytest.raises(ledger.InsufficientCredits):
            place(older, 101 * CREDIT)
        older = _user_without_account()
        turn(older, 5 * CREDIT)
        assert state(older) == (95 * CREDIT, 0)


def _user_without_account():
    from django.contrib.auth import get_user_model

    model = get_user_model()
    return model.objects.bulk_create([UserFactory.build()])[0]


class TestGrant:
    def test_each_cause_counts_once(self, user):
        fund(user, 0)
        first = ledger.grant(user.pk, 5, cause="order:1", reason="bought")
        again = ledger.grant(user.pk, 5, cause="order:1")
        assert (again.pk, again.reason) == (first.pk, "bought")
        ledger.grant(user.pk, 7, cause="order:2")
        assert state(user) == (12, 0)

    @pytest.mark.parametrize("amount", [0, -1])
    def test_only_positive_amounts_are_accepted(self, user, amount):
        with pytest.raises(ValidationFailed):
            ledger.grant(user.pk, amount, cause="x")
        assert rows(user) == []

    @pytest.mark.parametrize("reason", ["x" * 501, "a\0b"])
    def test_an_invalid_reason_is_refused(self, user, reason):
        with pytest.raises(ValidationFailed):
            ledger.grant(user.pk, 5, cause="x", reason=reason)
        assert rows(user) == []

    def test_a_balance_never_overflows(self, user, monkeypatch):
        fund(user, 995)
        monkeypatch.setattr(ledger, "BALANCE_LIMIT", 1000)
        with pytest.raises(Conflict):
            ledger.grant(user.pk, 6, cause="x")
        assert state(user) == (995, 0)
        ledger.grant(user.pk, 5, cause="y")
        ledger.adjust(user.pk, -1995, reason="r", staff=clerk())
        with pytest.raises(Conflict):
            ledger.adjust(user.pk, -6, reason="r", staff=clerk())
        assert state(user) == (-995, 0)

    @pytest.mark.parametrize("amount", [MAX_MICRO + 1, 2**63, 10**40])
    def test_no_amount_is_too_large_for_the_database(self, user, amount):
        for move in (
            lambda: ledger.grant(user.pk, amount, cause="x"),
            lambda: ledger.adjust(user.pk, -amount, reason="r", staff=clerk()),
            lambda: turn(user, amount),
            lambda: place(user, amount),
        ):
            with pytest.raises(ValidationFailed):
                move()
        assert rows(user) == []


class TestHold:
    def test_moves_available_credits_to_held(self, user):
        fund(user, 10)
        place(user, 4)
        place(user, 6)
        assert state(user) == (10, 10)
        assert ledger.account_for(user.pk).available == 0

    def test_available_credits_are_never_negative(self, user):
        fund(user, 12_500_000)
        place(user, 12_000_000)
        with pytest.raises(ledger.InsufficientCredits) as refusal:
            place(user, 500_001)
        assert refusal.value.status == 402
        assert refusal.value.details == {"available": "0.5", "topUpUrl": None}
        assert state(user) == (12_500_000, 12_000_000)
        assert rows(user) == [("HOLD", 12_000_000)]

    def test_a_refused_hold_does_not_break_the_callers_transaction(self, user):
        fund(user, 1)
        with transaction.atomic():
            with pytest.raises(ledger.InsufficientCredits):
                place(user, 2)
            place(user, 1)
        assert state(user) == (1, 1)

    def test_zero_moves_nothing(self, user):
        invocation = place(user, 0)
        ledger.capture(invocation, 0)
        ledger.capture(invocation, 0)
        assert rows(user) == []

    def test_a_repeated_hold_has_no_effect(self, user):
        fund(user, 10)
        invocation = place(user, 8)
        place(user, 8, invocation=invocation)
        assert state(user) == (10, 8)
        ledger.capture(invocation, 8)
        place(user, 8, invocation=invocation)
        assert state(user) == (2, 0)

    def test_negative_amounts_are_refused(self, user):
        with pytest.raises(ValidationFailed):
            place(user, -1)
        assert rows(user) == []

    def test_rolls_back_with_the_callers_transaction(self, user):
        fund(user, 10)
        with transaction.atomic():
            place(user, 4)
            transaction.set_rollback(True)
        assert state(user) == (10, 0)
        assert rows(user) == []


class TestSettlement:
    def test_captures_the_cost_and_releases_the_rest(self, user):
        fund(user, 10)
        assert ledger.capture(place(user, 8), 3)
        assert state(user) == (7, 0)
        assert sorted(rows(user)) == [("CAPTURE", 3), ("HOLD", 8), ("RELEASE", 5)]

    def test_rows_name_their_tool_chat_run_and_invocation(self, user):
        invocation = place(user, 8, run="run_7", chat="chat_7", tool="draw_chart")
        ledger.capture(invocation, 3)
        entries = LedgerEntry.objects.filter(invocation_id=invocation)
        assert entries.count() == 3
        assert set(entries.values_list("tool_key", "chat_id", "run_id")) == {("draw_chart", "chat_7", "run_7")}

    def test_a_capture_does_not_exceed_the_hold(self, user, caplog):
        fund(user, 10)
        with caplog.at_level(logging.WARNING, "credits.ledger"):
            assert ledger.capture(place(user, 8), 9)
        assert "more than its hold" in caplog.text
        assert state(user) == (2, 0)

    def test_a_capture_of_zero_releases_the_hold(self, user):
        fund(user, 10)
        assert ledger.capture(place(user, 8), 0)
        assert state(user) == (10, 0)
        assert sorted(rows(user)) == [("HOLD", 8), ("RELEASE", 8)]

    def test_a_hold_is_settled_once(self, user):
        fund(user, 100)
        place(user, 50)  # enough held credits for a wrong second settlement
        for first, second in [(3, 0), (3, 8), (0, 3), (0, 0)]:
            before = state(user)
            invocation = place(user, 8)
            ledger.capture(invocation, first)
            between = state(user)
            assert not ledger.capture(invocation, second)
            assert state(user) == between
            assert between[1] == before[1]

    def test_settling_an_unknown_invocation_has_no_effect(self, user):
        assert not ledger.capture("inv_none", 5)
        assert not ledger.capture("inv_none", 0)
        assert release_run("run_none") == 0
        assert rows(user) == []

    def test_negative_captures_are_refused(self, user):
        invocation = place(user, 8)
        with pytest.raises(ValidationFailed):
            ledger.capture(invocation, -1)
        assert state(user) == (100 * CREDIT, 8)

    def test_release_run_releases_the_open_holds(self, user):
        fund(user, 100)
        settled, *_ = (place(user, 10), place(user, 20), place(user, 30))
        other = place(user, 7, run="run_2")
        ledger.capture(settled, 4)
        assert release_run("run_1") == 50
        assert release_run("run_1") == 0
        assert state(user) == (96, 7)
        ledger.capture(other, 7)
        assert state(user) == (89, 0)


def hold_turn(user: Any, amount: int, cause: str = "turn:run_1:1", **options: Any) -> LedgerEntry:
    hold = ledger.hold(user.pk, amount, cause=cause, run_id="run_1", chat_id="chat_1", price={"m": 1}, **options)
    assert hold is not None
    return hold


class TestTurns:
    def test_a_turn_is_charged_to_its_hold_and_the_rest_is_released(self, user):
        fund(user, 10)
        hold = hold_turn(user, 10)
        assert state(user) == (10, 10)
        assert ledger.settle(hold, 4, price={"p": 2})
        assert not ledger.settle(hold, 4, price={"p": 2})
        assert rows(user) == [("HOLD", 10), ("RELEASE", 6), ("USAGE", 4)]
        assert state(user) == (6, 0)
        usage = LedgerEntry.objects.get(type="USAGE")
        assert (usage.tool_key, usage.against_id, usage.price, usage.run_id) == (None, hold.pk, {"p": 2}, "run_1")

    def test_a_hold_never_takes_available_below_zero(self, user):
        fund(user, 9)
        with pytest.raises(ledger.InsufficientCredits):
            hold_turn(user, 10)
        hold_turn(user, 9)
        with pytest.raises(ledger.InsufficientCredits):
            hold_turn(user, 1, cause="turn:run_1:2")
        assert rows(user) == [("HOLD", 9)]

    def test_a_turn_that_cost_more_is_charged_up_to_its_hold(self, user, caplog):
        fund(user, 10)
        hold = hold_turn(user, 5)
        assert ledger.settle(hold, 50, price={})
        assert rows(user) == [("HOLD", 5), ("USAGE", 5)]
        assert state(user) == (5, 0)
        assert "more than its hold" in caplog.text

    def test_a_complete_turn_has_a_row_even_if_it_cost_nothing(self, user):
        hold = hold_turn(user, 5)
        assert ledger.settle(hold, 0, price={})
        assert rows(user) == [("HOLD", 5), ("RELEASE", 5), ("USAGE", 0)]

    def test_only_staff_and_revocations_take_an_account_below_zero(self, user):
        fund(user, 0)
        ledger.grant(user.pk, 5, cause="x", expires_at=clock.now() + timedelta(days=1))
        place(user, 3)
        with pytest.raises(IntegrityError, match="account_available_not_negative"), transaction.atomic():
            ledger.take(EntryType.EXPIRY, user.pk, 5, cause="expiry", against_id=PendingExpiry.objects.get().pk)

    def test_a_hold_is_settled_once_in_whatever_ways(self, user):
        fund(user, 30)
        first, second = hold_turn(user, 10), hold_turn(user, 10, cause="turn:run_1:1.2")
        ledger.settle(first, 3, price={"p": 2})
        ledger.settle(first, 0)
        ledger.settle(first, 4, price={"p": 2, "partial": True})
        ledger.settle(second, 0)
        ledger.settle(second, 4, price={})
        assert sorted(rows(user)) == [("HOLD", 10)] * 2 + [("RELEASE", 7), ("RELEASE", 10), ("USAGE", 3)]
        assert state(user) == (27, 0)

    def test_a_free_turn_moves_nothing(self, user):
        cause = {"cause": "turn:run_1:1", "run_id": "run_1", "chat_id": "chat_1", "price": {}}
        assert ledger.hold(user.pk, 0, **cause) is None
        assert rows(user) == []

    @pytest.mark.parametrize("is_met", [False, True])
    def test_a_hold_with_a_condition_that_fails_changes_nothing(self, user, is_met):
        guards = Writes()
        guards.lock(get_user_model(), {"username": user.username if is_met else "nobody"})
        with contextlib.nullcontext() if is_met else pytest.raises(ledger.InsufficientCredits):
            hold_turn(user, 1, guards=guards)
        assert rows(user) == [("HOLD", 1)] * is_met

    def test_a_condition_that_is_met_does_not_replace_the_credits(self, user):
        guards = Writes()
        guards.lock(get_user_model(), {"username": user.username})
        with pytest.raises(ledger.InsufficientCredits):
            hold_turn(user, 101 * CREDIT, guards=guards)
        assert (rows(user), state(user)) == ([], (100 * CREDIT, 0))

    def test_the_holds_of_an_ended_run_are_released(self, user):
        fund(user, 30)
        hold = hold_turn(user, 10)
        place(user, 5)
        assert {open.amount for open in sums.open_holds("run_1")} == {5, hold.amount}
        assert release_run("run_1") == 15
        assert sums.open_holds("run_1") == []
        assert state(user) == (30, 0)

    def test_the_database_refuses_an_available_below_zero_except_by_staff(self, user):
        fund(user, 10)
        hold_turn(user, 8)
        with pytest.raises(IntegrityError, match="account_available_not_negative"), transaction.atomic():
            Account.objects.filter(pk=user.pk).update(held=11)
        ledger.adjust(user.pk, -5, reason="r", staff=clerk())
        assert ledger.account_for(user.pk).available == -3
        with pytest.raises(IntegrityError, match="account_available_not_negative"), transaction.atomic():
            Account.objects.filter(pk=user.pk).update(held=9)
        ledger.grant(user.pk, 4, cause="more")
        assert (ledger.account_for(user.pk).available, Account.objects.get(pk=user.pk).debt) == (1, 0)

    def test_negative_amounts_are_refused(self, user):
        with pytest.raises(ValidationFailed):
            hold_turn(user, -1)
        assert rows(user) == []
        hold = hold_turn(user, 1)
        with pytest.raises(ValidationFailed):
            ledger.settle(hold, -1, price={})
        assert rows(user) == [("HOLD", 1)]


class TestRefund:
    def test_returns_credits_and_copies_the_references_of_the_refunded_row(self, user):
        staff = UserFactory(is_staff=True)
        fund(user, 10)
        spent = spend(user, 8, run="run_7", chat="chat_7", tool="draw_chart")
        refund = ledger.refund(spent.pk, 5, reason="it failed", staff=staff)
        assert state(user) == (7, 0)
        assert (refund.tool_key, refund.chat_id, refund.run_id) == ("draw_chart", "chat_7", "run_7")
        assert (refund.against_id, refund.staff_id, refund.reason) == (spent.pk, staff.pk, "it failed")
        assert ledger.refund(turn(user, 2).pk, 2, reason="sorry", staff=staff).tool_key is None

    def test_all_refunds_together_do_not_exceed_the_amount(self, user):
        fund(user, 10)
        spent = spend(user, 8)
        ledger.refund(spent.pk, 5, reason="part", staff=clerk())
        with pytest.raises(Conflict, match=r"At most 0\.000003"):
            ledger.refund(spent.pk, 4, reason="too much", staff=clerk())
        assert state(user) == (7, 0)
        ledger.refund(spent.pk, 3, reason="the rest", staff=clerk())
        assert state(user) == (10, 0)

    def test_a_cause_makes_it_repeatable(self, user):
        fund(user, 10)
        spent = spend(user, 8)
        # The whole amount, so a second refund would exceed it.
        first = ledger.refund(spent.pk, 8, reason="once", staff=clerk(), cause="ticket:1")
        assert ledger.refund(spent.pk, 8, reason="once", staff=clerk(), cause="ticket:1").pk == first.pk
        assert state(user) == (10, 0)

    def test_only_spending_rows_can_be_refunded(self, user):
        place(user, 8, invocation="inv_x")
        held = LedgerEntry.objects.get(invocation_id="inv_x")
        for entry_id in (held.pk, "led_none"):
            with pytest.raises(NotFound):
                ledger.refund(entry_id, 1, reason="r", staff=clerk())

    @pytest.mark.parametrize(
        ("amount", "reason", "by", "field"),
        [
            (0, "r", clerk, "amount"),
            (-1, "r", clerk, "amount"),
            (1, "", clerk, "reason"),
            (1, "  ", clerk, "reason"),
            (1, "x" * 501, clerk, "reason"),
            (1, "a\0b", clerk, "reason"),
            (1, "r", lambda: None, "staff"),
            (1, "r", UserFactory, "staff"),
        ],
    )
    def test_invalid_input_changes_nothing(self, user, amount, reason, by, field):
        spent = spend(user, 8)
        before = state(user)
        with pytest.raises(ValidationFailed) as refusal:
            ledger.refund(spent.pk, amount, reason=reason, staff=by())
        assert list(refusal.value.details["fields"]) == [field]
        assert state(user) == before


class TestAdjustment:
    def test_is_signed_and_needs_a_reason(self, user):
        staff = UserFactory(is_staff=True)
        fund(user, 10)
        ledger.adjust(user.pk, -12, reason="chargeback", staff=staff)
        assert state(user) == (-2, 0)
        ledger.adjust(user.pk, 5, reason="goodwill", staff=staff)
        assert state(user) == (3, 0)
        assert set(
            LedgerEntry.objects.filter(reason__in=["chargeback", "goodwill"]).values_list("staff", flat=True)
        ) == {staff.pk}

    @pytest.mark.parametrize(
        ("amount", "reason", "by", "field"),
        [
            (0, "r", clerk, "amount"),
            (1, " ", clerk, "reason"),
            (1, "x" * 501, clerk, "reason"),
            (1, "a\0b", clerk, "reason"),
            (1, "r", lambda: None, "staff"),
            (-1, "r", UserFactory, "staff"),
        ],
    )
    def test_invalid_input_changes_nothing(self, user, amount, reason, by, field):
        before = state(user)
        with pytest.raises(ValidationFailed) as refusal:
            ledger.adjust(user.pk, amount, reason=reason, staff=by())
        assert list(refusal.value.details["fields"]) == [field]
        assert (state(user), rows(user)) == (before, [])

    def test_a_cause_makes_it_repeatable(self, user):
        fund(user, 10)
        for _ in range(2):
            ledger.adjust(user.pk, 5, reason="goodwill", staff=clerk(), cause="ticket:1")
        assert state(user) == (15, 0)


class TestRuns:
    def test_spent_and_held(self, user):
        fund(user, 1000)
        assert sums.committed("run_1") == 0
        refunded = spend(user, 100)
        ledger.refund(refunded.pk, 30, reason="r", staff=clerk())
        ledger.capture(place(user, 50), 20)
        turn(user, 5)
        ledger.capture(place(user, 11), 0)
        place(user, 40)
        spend(user, 500, run="run_2")
        assert sums.committed("run_1") == 100 - 30 + 20 + 5 + 40
        rows = LedgerEntry.objects.filter(run_id="run_1").annotate(committed=sums.committed_subquery("run_id"))
        assert set(rows.values_list("committed", flat=True)) == {135}

    def test_spent_as_a_column_of_a_queryset(self, user):
        """HOLD rows replace runs here: only a column with the run's id matters."""
        spent = spend(user, 100, run="run_1")
        ledger.refund(spent.pk, 30, reason="r", staff=clerk())
        turn(user, 5, run="run_1")
        place(user, 9, run="run_3")
        entries = LedgerEntry.objects.filter(type="HOLD", tool_key="draw").annotate(
            spent=sums.run_spent_subquery("run_id")
        )
        assert list(entries.order_by("run_id").values_list("run_id", "spent")) == [("run_1", 75), ("run_3", 0)]
        assert all(type(value) is int for value in entries.values_list("spent", flat=True))


def test_drift_finds_a_changed_balance(user):
    spend(user, 5)
    assert list(drift()) == []
    Account.objects.filter(pk=user.pk).update(balance=1)
    assert len(list(drift())) == 1
    Account.objects.filter(pk=user.pk).update(balance=100 * CREDIT - 5)


def test_each_way_to_add_credits_is_announced_so_that_runs_go_on(user, request):
    told = []
    credits_added.connect(tell := lambda user_id, **_: told.append(user_id))
    request.addfinalizer(lambda: credits_added.disconnect(tell))
    ledger.grant(user.pk, 5, cause="x")
    assert told == [user.pk]
    ledger.adjust(user.pk, 5, reason="r", staff=clerk())
    assert told == [user.pk] * 2
    ledger.refund(spend(user, 5).pk, 5, reason="r", staff=clerk())
    assert told == [user.pk] * 3
