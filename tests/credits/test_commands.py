"""``grant_credits`` and ``reconcile_credits``."""

from io import StringIO

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command

from credits.models import Account, LedgerEntry
from tests.credits.helpers import CREDIT, rows, spend, state

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


class TestGrant:
    def test_grants_and_says_so(self, user):
        assert run("grant_credits", user.username, "12.5", "--reason", "Goodwill") == (
            f"Granted 12.5 credits to {user.username}; available now: 112.5.\n"
        )
        assert state(user) == (112_500_000, 0)
        assert LedgerEntry.objects.get(reason="Goodwill").type == "GRANT"

    def test_twice_is_two_grants(self, user):
        for _ in range(2):
            run("grant_credits", user.username, "1", "--reason", "Weekly")
        assert state(user) == (102 * CREDIT, 0)

    @pytest.mark.parametrize(
        ("amount", "says"),
        [
            ("-5", "at least"),
            ("0", "at least"),
            ("NaN", "finite"),
            ("Infinity", "finite"),
            ("1.0000001", "6 decimals"),
            ("1e30", "at most"),
            ("9" * 5000, "at most"),
            ("twelve", "a number"),
            ("", "a number"),
            ("1,5", "a number"),
        ],
    )
    def test_a_bad_amount_is_named_and_changes_nothing(self, user, amount, says):
        with pytest.raises(CommandError, match=f"AMOUNT.*{says}"):
            run("grant_credits", "--reason", "r", "--", user.username, amount)
        assert rows(user) == []

    @pytest.mark.parametrize("reason", ["", "  ", "x" * 501, "a\0b"])
    def test_a_bad_reason_changes_nothing(self, user, reason):
        with pytest.raises(CommandError, match="reason"):
            run("grant_credits", user.username, "5", "--reason", reason)
        assert rows(user) == []

    @pytest.mark.parametrize("username", ["nobody", "", "a\0b"])
    def test_an_unknown_user(self, user, username):
        with pytest.raises(CommandError, match="no user"):
            run("grant_credits", username, "5", "--reason", "r")

    def test_a_reason_is_required(self, user):
        with pytest.raises(CommandError):
            run("grant_credits", user.username, "5")
        assert rows(user) == []


class TestReconcile:
    def test_agreement(self, user):
        spend(user, 5)
        assert run("reconcile_credits") == "Every account agrees with its ledger.\n"

    def test_drift_is_said_and_never_mended(self, user):
        Account.objects.filter(pk=user.pk).update(balance=7)
        out = StringIO()
        with pytest.raises(CommandError, match="1 difference found") as failure:
            call_command("reconcile_credits", stdout=out)
        assert failure.value.returncode == 1
        assert out.getvalue() == f"{user.username}: balance is 0.000007, the ledger says 100\n"
        assert state(user) == (7, 0)


@pytest.mark.parametrize(
    ("value", "wrong"), [("100", False), ("0", False), ("-1", True), ("many", True), ("NaN", True)]
)
def test_a_wrong_signup_setting_stops_the_start(settings, value, wrong):
    settings.SIGNUP_CREDITS = value
    assert any(found.id == "credits.E001" for found in run_checks()) is wrong
