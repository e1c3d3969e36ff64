"""The commands that move credits and reconcile accounts."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from config.kernel.clock import iso
from credits.grants import expire_grants
from credits.models import Account, LedgerEntry, PendingExpiry
from tests.credits.helpers import CREDIT, fund, rows, spend, state, stop_clock
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


class TestGrant:
    def test_grants_and_prints_the_result(self, user):
        assert run("grant_credits", user.username, "12.5", "--reason", "Goodwill") == (
            f"Granted 12.5 credits to {user.username}; available now: 112.5.\n"
        )
        assert state(user) == (112_500_000, 0)
        assert LedgerEntry.objects.get(reason="Goodwill").type == "GRANT"

    def test_a_repeated_command_makes_a_second_grant(self, user):
        for _ in range(2):
            run("grant_credits", user.username, "1", "--reason", "Weekly")
        assert state(user) == (102 * CREDIT, 0)

    @pytest.mark.parametrize(
        ("amount", "says"),
        [
            ("-5", "at least"),
            ("0", "at least"),
            ("1.0000001", "6 decimals"),
            ("9" * 5000, "at most"),
            *((text, "decimal text") for text in ("NaN", "Infinity", "1e2", "1_000", "twelve", "", "1,5", "\u0665")),
        ],
    )
    def test_an_invalid_amount_is_reported_and_changes_nothing(self, user, amount, says):
        with pytest.raises(CommandError, match=f"^AMOUNT.*{says}") as refusal:
            run("grant_credits", "--reason", "r", "--", user.username, amount)
        assert "\n" not in str(refusal.value)
        assert (refusal.value.returncode, rows(user)) == (1, [])

    @pytest.mark.parametrize("reason", ["", "  ", "x" * 501, "a\0b"])
    def test_an_invalid_reason_changes_nothing(self, user, reason):
        with pytest.raises(CommandError, match="reason"):
            run("grant_credits", user.username, "5", "--reason", reason)
        assert rows(user) == []

    @pytest.mark.parametrize("username", ["nobody", "", "a\0b", "\udcff"])
    def test_an_unknown_user_is_reported(self, user, username):
        with pytest.raises(CommandError, match="no user"):
            run("grant_credits", username, "5", "--reason", "r")

    def test_a_reason_is_required(self, user):
        with pytest.raises(CommandError):
            run("grant_credits", user.username, "5")
        assert rows(user) == []


class TestGrantThatExpires:
    @pytest.fixture
    def now(self, monkeypatch, user):
        fund(user, 0)
        return stop_clock(monkeypatch, datetime(2099, 5, 5, 12, tzinfo=UTC))

    @pytest.mark.parametrize(
        ("expires", "end"),
        [
            ("30", datetime(2099, 6, 4, 12, tzinfo=UTC)),
            ("3650", datetime(2109, 5, 3, 12, tzinfo=UTC)),
            ("2099-06-01T00:00:00Z", datetime(2099, 6, 1, tzinfo=UTC)),
            ("2099-05-05T14:00:00.001+02:00", datetime(2099, 5, 5, 12, 0, 0, 1000, tzinfo=UTC)),
        ],
    )
    def test_the_unspent_part_expires_at_the_given_time(self, user, now, expires, end):
        said = run("grant_credits", user.username, "10", "--reason", "Trial", "--expires", expires)
        assert said == f"Granted 10 credits to {user.username} until {iso(end)}; available now: 10.\n"
        spend(user, 4 * CREDIT)
        now.now = end - timedelta(microseconds=1)
        assert sum(expire_grants()) == 0
        now.now = end
        assert sum(expire_grants()) == 6 * CREDIT
        assert state(user) == (0, 0)

    @pytest.mark.parametrize(
        ("expires", "says"),
        [
            ("0", "in the future"),
            ("2099-05-05T12:00:00Z", "in the future"),
            ("0001-01-01T00:00:00+14:00", "a time with its zone"),
            ("3651", "At most 3650 days"),
            ("9" * 5000, "At most 3650 days"),
            ("9999-12-31T23:59:59-14:00", "a time with its zone"),
            ("2100-01-31T00:00:00", "a time with its zone"),
            ("2100-01-31", "a time with its zone"),
            *((text, "a time with its zone") for text in ("", "soon", "-1", "1.5", "NaN", "٣", "2027-02-30T00:00Z")),
        ],
    )
    def test_an_invalid_expiry_is_reported_and_changes_nothing(self, user, now, expires, says):
        with pytest.raises(CommandError, match=f"--expires: .*{says}") as refusal:
            run("grant_credits", user.username, "10", "--reason", "r", f"--expires={expires}")
        assert (refusal.value.returncode, rows(user), PendingExpiry.objects.count()) == (1, [], 0)


BAD_AMOUNTS = ["0", "NaN", "-Infinity", "1.0000001", "1e30", "twelve", ""]


class TestStaff:
    @pytest.fixture
    def staff(self):
        return UserFactory(is_staff=True)

    def test_adjusts_up_and_down(self, user, staff):
        more = ("--reason", "Chargeback", "--staff", staff.username)
        assert run("adjust_credits", user.username, "-112.5", *more) == (
            f"Adjusted {user.username} by -112.5 credits; available now: -12.5.\n"
        )
        run("adjust_credits", user.username, "0.5", *more)
        assert state(user) == (-12_000_000, 0)
        kept = LedgerEntry.objects.filter(type="ADJUSTMENT").values_list("staff_id", "reason")
        assert list(kept) == [(staff.pk, "Chargeback")] * 2

    def test_refunds_of_a_row_do_not_exceed_its_amount(self, user, staff):
        spent = spend(user, 3_000_000)
        more = ("--reason", "It failed", "--staff", staff.username)
        assert run("refund_credits", spent.pk, "2", *more) == f"Refunded 2 credits of {spent.pk}; available now: 99.\n"
        with pytest.raises(CommandError, match="At most 1 credits"):
            run("refund_credits", spent.pk, "1.5", *more)
        kept = LedgerEntry.objects.get(type="REFUND")
        assert (kept.staff_id, kept.reason, kept.against_id) == (staff.pk, "It failed", spent.pk)

    @pytest.mark.parametrize("entry", ["led_none", "", "a\0b", "x" * 5000])
    def test_a_row_that_does_not_exist_is_not_refunded(self, staff, entry):
        with pytest.raises(CommandError, match="There is no row"):
            run("refund_credits", entry, "1", "--reason", "r", "--staff", staff.username)

    @pytest.mark.parametrize("command", ["adjust_credits", "refund_credits"])
    @pytest.mark.parametrize(
        ("amount", "reason", "by"),
        [
            *((amount, "r", "staff") for amount in BAD_AMOUNTS),
            ("1", " ", "staff"),
            ("1", "x" * 501, "staff"),
            ("1", "a\0b", "staff"),
            ("1", "r", "nobody"),
            ("1", "r", "user"),
            ("1", "r", "gone"),
            ("1", "r", ""),
        ],
    )
    def test_invalid_input_changes_nothing(self, user, staff, command, amount, reason, by):
        spent = spend(user, 3_000_000)
        before = rows(user), state(user)
        gone = UserFactory(is_staff=True, is_active=False)
        who = {"staff": staff.username, "user": user.username, "gone": gone.username}.get(by, by)
        target = user.username if command == "adjust_credits" else spent.pk
        with pytest.raises(CommandError) as refusal:
            run(command, "--reason", reason, "--staff", who, "--", target, amount)
        assert "\n" not in str(refusal.value)
        assert by == "staff" or "There is no staff user" in str(refusal.value)
        assert refusal.value.returncode == 1
        assert (rows(user), state(user)) == before

    def test_an_unknown_user_is_not_adjusted(self, staff):
        with pytest.raises(CommandError, match="no user"):
            run("adjust_credits", "nobody", "1", "--reason", "r", "--staff", staff.username)


class TestReconcile:
    def test_accounts_that_agree_are_reported(self, user):
        spend(user, 5)
        assert run("reconcile_credits") == "Every account agrees with its ledger.\n"

    def test_drift_is_reported_and_not_corrected(self, user):
        Account.objects.filter(pk=user.pk).update(balance=7)
        out = StringIO()
        with pytest.raises(CommandError, match="1 difference found") as failure:
            call_command("reconcile_credits", stdout=out)
        assert failure.value.returncode == 1
        assert out.getvalue() == f"{user.username}: balance is 0.000007, the ledger says 100\n"
        assert state(user) == (7, 0)
