"""The rules that the database itself enforces."""

import os
import sqlite3
import uuid
from importlib import import_module

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import F
from django.utils import timezone

from credits import ledger
from credits.models import CORRECTIONS, SETTLEMENTS, Account, EntryType, LedgerEntry
from credits.reconcile import drift
from tests.credits.helpers import clerk, fund, place, rows, spend, state
from tests.factories import UserFactory
from tests.stack import postgres

pytestmark = pytest.mark.django_db


def refusal(**fields) -> str:
    """Insert a row. Returns the error of the database, which names the violated rule, or an empty string."""
    try:
        with transaction.atomic():
            LedgerEntry.objects.create(**fields)
    except IntegrityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("type", "amount", "rule"),
    [
        *(
            (type, amount, "ledger_amount_sign")
            for type in EntryType.values
            if type not in ("USAGE", "ADJUSTMENT")
            for amount in (0, -1)
        ),
        ("USAGE", -1, "ledger_amount_sign"),
        ("ADJUSTMENT", 0, "ledger_amount_sign"),
        ("GIFT", 1, "ledger_type_known"),
    ],
)
def test_signs_and_types(user, type, amount, rule):
    against = spend(user, 5) if type in (*SETTLEMENTS, *CORRECTIONS) else None
    row = {"account_id": user.pk, "type": type, "cause": "x", "reason": "r", "staff": clerk(), "against": against}
    assert rule in refusal(amount=amount, **row)
    assert LedgerEntry.objects.filter(cause="x").count() == 0


@pytest.mark.parametrize(
    ("type", "amount"), [("USAGE", 0), ("ADJUSTMENT", -1), *((type, 1) for type in EntryType.values)]
)
def test_allowed_amounts(user, type, amount):
    against = spend(user, 5) if type in (*SETTLEMENTS, *CORRECTIONS) else None
    row = {"account_id": user.pk, "type": type, "cause": "x", "reason": "r", "staff": clerk(), "against": against}
    assert refusal(amount=amount, **row) == ""


@pytest.mark.parametrize("type", ["CAPTURE", "USAGE", "RELEASE", "REFUND", "EXPIRY"])
def test_settlements_and_corrections_require_against(user, type):
    row = {"account_id": user.pk, "type": type, "amount": 1, "cause": "x", "reason": "r", "staff": clerk()}
    assert "ledger_against_by_type" in refusal(**row)


@pytest.mark.parametrize("type", ["GRANT", "HOLD", "ADJUSTMENT"])
def test_other_types_forbid_against(user, type):
    row = {"account_id": user.pk, "type": type, "amount": 1, "cause": "x", "reason": "r", "staff": clerk()}
    assert "ledger_against_by_type" in refusal(**row, against=spend(user, 5))


@pytest.mark.parametrize("type", ["REFUND", "ADJUSTMENT"])
def test_corrections_require_a_reason_and_staff(user, type):
    against = spend(user, 5) if type == "REFUND" else None
    row = {"account_id": user.pk, "type": type, "amount": 1, "cause": "x", "against": against}
    assert "ledger_correction_has_reason" in refusal(**row, staff=clerk())
    assert "ledger_correction_has_staff" in refusal(**row, reason="r")


def test_only_grants_expire(user):
    row = {"account_id": user.pk, "amount": 1, "cause": "x", "expires_at": timezone.now()}
    assert "ledger_only_grants_expire" in refusal(type="HOLD", **row)
    assert refusal(type="GRANT", **row) == ""


def test_causes_are_unique_across_accounts(user):
    other = UserFactory()
    assert refusal(account_id=user.pk, type="GRANT", amount=1, cause="x") == ""
    assert "cause" in refusal(account_id=other.pk, type="GRANT", amount=1, cause="x")


@pytest.mark.parametrize("type", ["CAPTURE", "RELEASE"])
def test_a_hold_has_at_most_one_settlement_of_each_type(user, type):
    ledger.capture(place(user, 5), 3)
    settled = LedgerEntry.objects.get(type=type)
    row = {"account_id": user.pk, "amount": 1, "against_id": settled.against_id}
    said = refusal(**row, type=type, cause="x")
    assert "ledger_one_settlement_of_a_kind" in said or "credits_ledgerentry.against_id" in said
    # A row may have several EXPIRY or REFUND rows.
    for number in (1, 2):
        row = {"account_id": user.pk, "amount": 1, "against_id": settled.pk}
        assert refusal(**row, type="EXPIRY", cause=f"y{number}") == ""


@pytest.mark.parametrize("change", [{"held": -1}, {"balance": 9 * 10**18 + 1}, {"balance": -9 * 10**18 - 1}])
def test_accounts_stay_in_range(user, change):
    rule = "account_held_not_negative" if "held" in change else "account_balance_in_range"
    change |= {"debt": 9 * 10**18 + 1} if change.get("balance", 0) < 0 else {}
    with pytest.raises(IntegrityError, match=rule), transaction.atomic():
        Account.objects.filter(pk=user.pk).update(**change)


def test_ledger_rows_cannot_be_updated(user):
    entry = spend(user, 5)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        LedgerEntry.objects.filter(pk=entry.pk).update(amount=4)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        entry.save()
    assert LedgerEntry.objects.get(pk=entry.pk).amount == 5


@pytest.mark.django_db(transaction=True)
def test_ledger_rows_cannot_be_deleted(tmp_path):
    """The triggers allow deletion in test databases, so on SQLite a copy with an ordinary name is tested."""
    user = UserFactory()
    place(user, 5)
    if connection.vendor == "postgresql":
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            LedgerEntry.objects.all()._raw_delete("default")
        assert LedgerEntry.objects.filter(account_id=user.pk).count() == 2
        return
    connection.ensure_connection()
    with sqlite3.connect(tmp_path / "db.sqlite3") as copy:
        connection.connection.backup(copy)
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            copy.execute("DELETE FROM credits_ledgerentry")
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            copy.execute("UPDATE credits_ledgerentry SET amount = 4")
        assert copy.execute("SELECT count(*) FROM credits_ledgerentry").fetchone() == (2,)
    copy.close()


@pytest.mark.services
@pytest.mark.skipif("TEST_DATABASE_URL" not in os.environ, reason="SQLite knows no TRUNCATE")
def test_the_ledger_cannot_be_truncated():
    """The triggers allow TRUNCATE in test databases, so a database with an ordinary name is tested."""
    url = postgres.with_database(os.environ["TEST_DATABASE_URL"], f"ordinary_{uuid.uuid4().hex[:12]}")
    with psycopg.connect(os.environ["TEST_DATABASE_URL"], autocommit=True) as server:
        server.execute(f"CREATE DATABASE {url.rpartition('/')[2]} TEMPLATE template0")
    try:
        with psycopg.connect(url, autocommit=True) as database:
            database.execute("CREATE TABLE credits_ledgerentry (amount int)")
            database.execute("INSERT INTO credits_ledgerentry VALUES (1)")
            for statement in import_module("credits.migrations.0002_triggers").SEAL_POSTGRESQL:
                database.execute(statement)
            for statement in ("TRUNCATE credits_ledgerentry", "DELETE FROM credits_ledgerentry"):
                with pytest.raises(psycopg.IntegrityError, match="append-only"):
                    database.execute(statement)
            assert database.execute("SELECT amount FROM credits_ledgerentry").fetchall() == [(1,)]
    finally:
        postgres.drop_database(url)


def test_users_with_an_account_cannot_be_deleted(user):
    with pytest.raises(IntegrityError):
        user.delete()


def test_an_account_that_holds_less_than_its_hold_is_an_error_and_pays_nothing(user):
    """Only a write outside the service can cause this state. The error must move no credits."""
    fund(user, 100)
    invocation = place(user, 10)
    Account.objects.filter(pk=user.pk).update(held=9)
    for settle in (lambda: ledger.capture(invocation, 4), lambda: ledger.capture(invocation, 0)):
        with pytest.raises(RuntimeError, match="less than its open hold"):
            settle()
    assert (state(user), rows(user)) == ((100, 9), [("HOLD", 10)])


class TestReconcile:
    def test_names_each_difference(self, user):
        fund(user, 100)
        place(user, 10)
        assert list(drift()) == []
        Account.objects.filter(pk=user.pk).update(balance=101_000_000, held=11)
        assert list(drift()) == [
            f"{user.username}: balance is 101, the ledger says 0.0001",
            f"{user.username}: held is 0.000011, the ledger says 0.00001",
        ]

    @pytest.mark.parametrize("off", ["balance", "held"])
    def test_finds_each_difference_separately(self, user, off):
        place(user, 10)
        Account.objects.filter(pk=user.pk).update(**{off: F(off) + 1})
        (line,) = drift()
        assert line.startswith(f"{user.username}: {off} is ")

    @pytest.mark.parametrize(("amount", "shown"), [(4, "0.000004"), (11, "0.000011")])
    def test_finds_a_hold_settled_with_another_amount(self, user, amount, shown):
        invocation = place(user, 10)
        hold = LedgerEntry.objects.get(invocation_id=invocation)
        LedgerEntry.objects.create(account_id=user.pk, type="CAPTURE", amount=amount, against=hold, cause="x")
        assert f"{hold.pk}: a hold of 0.00001 was settled with {shown}" in list(drift())

    def test_finds_refunds_over_the_amount(self, user):
        spent = spend(user, 5)
        for number in (1, 2):
            LedgerEntry.objects.create(
                account_id=user.pk,
                type="REFUND",
                amount=3,
                against=spent,
                cause=f"x{number}",
                reason="r",
                staff=clerk(),
            )
        assert f"{spent.pk}: 0.000006 of 0.000005 was refunded" in list(drift())

    def test_an_account_without_rows(self, settings):
        settings.SIGNUP_CREDITS = "0"
        user = UserFactory()
        assert list(drift()) == []
        Account.objects.filter(pk=user.pk).update(balance=1)
        assert list(drift()) == [f"{user.username}: balance is 0.000001, the ledger says 0"]
        assert rows(user) == []
