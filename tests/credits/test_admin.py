"""The pages of accounts and the ledger are read-only."""

import pytest
from django.urls import reverse

from credits import grants
from credits.models import Account, LedgerEntry
from tests.credits.helpers import spend, state
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def entry(user) -> LedgerEntry:
    return spend(user, 12_500_000, tool="draw_chart")


def test_shows_credits_not_micro_credits(admin_client, user, entry):
    for page in (reverse("admin:credits_account_changelist"), reverse("admin:credits_account_change", args=[user.pk])):
        assert "87.5" in admin_client.get(page).content.decode()
    for page in (
        reverse("admin:credits_ledgerentry_changelist"),
        reverse("admin:credits_ledgerentry_change", args=[entry.pk]),
    ):
        assert "12.5" in admin_client.get(page).content.decode()


def test_what_the_backend_granted_and_took_back_names_the_payment_and_the_grant(admin_client, user):
    given, _ = grants.grant(user.pk, 5, reference="pay_4711", reason="Bought", expires_at=None)
    grants.revoke(given, reference="refund_42", reason="Charge-back", mode="all")
    taken = LedgerEntry.objects.get(reference="refund_42")
    for entry, reference in ((given, "pay_4711"), (taken, "refund_42")):
        assert (
            reference in admin_client.get(reverse("admin:credits_ledgerentry_change", args=[entry.pk])).content.decode()
        )
    page = admin_client.get(reverse("admin:credits_ledgerentry_changelist")).content.decode()
    assert f'{reverse("admin:credits_ledgerentry_change", args=[given.pk])}">grant</a>' in page


@pytest.mark.parametrize("model", ["account", "ledgerentry"])
def test_nothing_can_be_added_changed_or_deleted(admin_client, user, entry, model):
    pk = user.pk if model == "account" else entry.pk
    before = state(user), LedgerEntry.objects.count()
    assert admin_client.get(reverse(f"admin:credits_{model}_add")).status_code == 403
    for page, body in (
        ("change", {"balance": "1", "amount": "1", "amount_credits": "1", "reason": "x"}),
        ("delete", {"post": "yes"}),
    ):
        assert admin_client.post(reverse(f"admin:credits_{model}_{page}", args=[pk]), body).status_code == 403
    listing = reverse(f"admin:credits_{model}_changelist")
    admin_client.post(listing, {"action": "delete_selected", "_selected_action": [pk], "post": "yes"})
    assert (state(user), LedgerEntry.objects.count()) == before
    assert "delete_selected" not in admin_client.get(listing).content.decode()


def test_a_user_with_an_account_cannot_be_deleted(admin_client, user, entry):
    admin_client.post(reverse("admin:auth_user_delete", args=[user.pk]), {"post": "yes"})
    assert Account.objects.filter(pk=user.pk).exists()


def test_lists_make_no_query_per_row(admin_client, user, django_assert_max_num_queries):
    for _ in range(5):
        spend(UserFactory(), 1)
    for model in ("account", "ledgerentry"):
        with django_assert_max_num_queries(8):
            admin_client.get(reverse(f"admin:credits_{model}_changelist"))


def test_search_finds_a_run(admin_client, user, entry):
    page = admin_client.get(reverse("admin:credits_ledgerentry_changelist"), {"q": "run_1"}).content.decode()
    assert entry.pk in page
    page = admin_client.get(reverse("admin:credits_ledgerentry_changelist"), {"q": "run_none"}).content.decode()
    assert entry.pk not in page
