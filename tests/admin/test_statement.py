"""The ledger in words: sentences, signed amounts, balances, folded holds, and the balances in forms about credits."""

import html
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from config.kernel.money import MICRO
from credits import ledger, statement
from credits.models import LedgerEntry
from runs.models import ToolInvocation
from tests import factories
from tests.admin.conftest import make_run
from tests.credits.helpers import fund, place

pytestmark = pytest.mark.django_db

LEDGER = reverse("admin:credits_ledgerentry_changelist")


def rows(client: Any, query: str = "") -> list[Any]:
    return client.get(LEDGER + query).context["cl"].result_list


def text_of(page: bytes) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page.decode())))


@pytest.fixture
def approved(user) -> LedgerEntry:
    """A charge of a call that the user approved."""
    fund(user, 100 * MICRO)
    run = factories.RunFactory(chat=factories.ChatFactory(user=user))
    call = factories.ToolInvocationFactory(run=run, name="draw_chart")
    factories.WaitpointFactory(
        run=run, invocation=call, kind="CREDIT_APPROVAL", status="COMPLETED", request_payload={},
        resolved_payload={"approved": True}, resolved_at=datetime(2026, 11, 20, 1, 12, 9, tzinfo=UTC),
    )  # fmt: skip
    ledger.hold(
        user.pk, 20 * MICRO, invocation_id=call.pk, tool_key="draw_chart", chat_id=run.chat_id, run_id=run.pk, price={}
    )
    ledger.capture(call.pk, 12 * MICRO)
    return LedgerEntry.objects.get(type="CAPTURE", invocation_id=call.pk)


def test_a_charge_says_what_it_was_for_and_who_approved_it(sign_in, user, approved):
    words = f"12 credits for draw_chart, approved by {user.username} 01:12:09"
    for role in ("viewer", "support", "billing"):
        client = sign_in(role)
        page = client.get(LEDGER).content
        assert words in text_of(page)
        assert "−12 88 " in text_of(page)
        for model, key in (("runs_run", approved.run_id), ("runs_toolinvocation", approved.invocation_id),
                           ("chats_chat", approved.chat_id)):  # fmt: skip
            assert reverse(f"admin:{model}_change", args=[key]).encode() in page
        entry = client.get(reverse("admin:credits_ledgerentry_change", args=[approved.pk])).content
        assert words in text_of(entry)
        assert "20 held, 8 available again" in text_of(entry)
        assert b"000000" not in page + entry


def test_every_type_of_row_has_a_sentence(boss, user, approved):
    by = {"reason": "Broken chart", "staff": boss.person}
    ledger.refund(approved.pk, MICRO // 4, **by)
    ledger.adjust(user.pk, -3 * MICRO, **by)
    call = place(user, 2 * MICRO)
    name = boss.person.username
    said = [statement.sentence(entry) for entry in rows(boss, f"?q={user.username}")]
    assert said == [
        "2 credits held for draw",
        f"3 credits removed by {name}: Broken chart",
        f"0.25 credits refunded by {name} for draw_chart: Broken chart",
        "12 credits for draw_chart",
        "100 credits granted: Sign-up credits",
    ]
    assert [entry.balance for entry in rows(boss, f"?q={user.username}")] == [
        85_250_000,
        85_250_000,
        88_250_000,
        88 * MICRO,
        100 * MICRO,
    ]
    ledger.capture(call, 0)
    assert statement.sentence(rows(boss)[0]) == "2 credits held for draw are available again"


def test_the_charge_of_a_summary_names_it(user):
    fund(user, 100 * MICRO)
    price = {"model": "gpt", "turn": "c1"}
    hold = ledger.hold(user.pk, MICRO, cause="turn:run_1:c1:1.1", run_id="run_1", chat_id="chat_1", price=price)
    ledger.settle(hold, MICRO // 2, price={"model": "gpt"})
    assert statement.sentence(LedgerEntry.objects.get(type="USAGE")) == "0.5 credits for gpt, summary"


def test_a_search_for_a_call_finds_its_hold_its_settlement_and_its_refunds_alone(boss, user, approved):
    ledger.refund(approved.pk, MICRO, reason="Broken chart", staff=boss.person)
    place(user, 2 * MICRO, run=approved.run_id)
    found = rows(boss, f"?q={approved.invocation_id}&holds=all")
    assert sorted(entry.type for entry in found) == ["CAPTURE", "HOLD", "REFUND", "RELEASE"]
    assert {entry.invocation_id for entry in found} == {approved.invocation_id}
    assert rows(boss, "?q=inv_none&holds=all") == []


def test_settled_holds_are_folded_unless_they_are_asked_for(boss, user, approved):
    mine = f"q={user.username}"
    assert [entry.type for entry in rows(boss, f"?{mine}")] == ["CAPTURE", "GRANT"]
    assert [entry.type for entry in rows(boss, f"?{mine}&type__exact=HOLD")] == ["HOLD"]
    assert {entry.type for entry in rows(boss, f"?{mine}&holds=all")} == {"CAPTURE", "RELEASE", "HOLD", "GRANT"}


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no hashed subplans")
def test_a_page_of_the_ledger_does_not_read_all_settlements():
    assert "hashed" not in LedgerEntry.objects.filter(statement.folded()).explain()


def test_balances_need_a_bounded_number_of_rows(boss, user, approved, monkeypatch):
    monkeypatch.setattr(statement, "LATER_MAX", 3)
    assert {entry.balance for entry in rows(boss)} == {None}
    assert boss.get(LEDGER).status_code == 200


def test_the_ledger_takes_a_fixed_number_of_queries(boss, user, approved):
    def queries() -> int:
        with CaptureQueriesContext(connection) as asked:
            boss.get(LEDGER)
        return len(asked)

    queries()
    before = queries()
    for _ in range(3):
        make_run(factories.UserFactory(), turns=2)
    assert ToolInvocation.objects.count() > 5
    assert queries() == before <= 8


def test_a_refund_shows_what_is_left_and_the_balances(sign_in, user, approved):
    billing = sign_in("billing")
    page = reverse("admin:credits_ledgerentry_do_one", args=[approved.pk, "refund"])
    ledger.refund(approved.pk, 5 * MICRO, reason="x", staff=billing.person)
    shown = text_of(billing.get(page).content)
    assert "12 credits for draw_chart" in shown
    assert "Can still be refunded 7 credits" in shown
    assert "Balance now 93 credits" in shown
    body = {"_selected_action": approved.pk, "amount": "2", "reason": "y"}
    review = text_of(billing.post(reverse("admin:credits_ledgerentry_do", args=["refund"]), body).content)
    assert "Balance now 93 credits" in review
    assert "Balance after 95 credits" in review
    body["amount"] = "7.000001"
    refused = billing.post(reverse("admin:credits_ledgerentry_do", args=["refund"]), body)
    assert "At most 7 credits can still be refunded." in text_of(refused.content)
    assert not refused.context["confirm"]


def test_a_grant_to_a_named_user_shows_the_balances(sign_in, user):
    fund(user, 3 * MICRO)
    billing = sign_in("billing")
    body = {"user": user.username, "amount": "4.5", "reason": "y"}
    review = text_of(billing.post(reverse("admin:credits_account_do", args=["grant_to"]), body).content)
    assert "Balance now 3 credits" in review
    assert "Balance after 7.5 credits" in review
