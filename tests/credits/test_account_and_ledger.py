"""``/me/credits`` and ``/me/credits/ledger`` over HTTP."""

import csv
import io
import weakref
from datetime import timedelta

import pytest
from django.db import OperationalError, connection
from django.db.models.signals import post_init
from django.test.utils import CaptureQueriesContext

from config.kernel import clock
from config.kernel.clock import iso
from config.kernel.errors import Conflict
from credits import ledger, serializers, usage
from credits.models import LedgerEntry
from tests.credits.helpers import CREDIT, clerk, fund, place, spend, stop_clock, turn
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db
ACCOUNT = "/me/credits"
LEDGER = "/api/v1/me/credits/ledger"
COLUMNS = ["id", "type", "amount", "toolKey", "chatId", "runId", "invocationId", "reason", "reference", "expiresAt"]
COLUMNS += ["createdAt", "balanceAfter"]


def read_csv(client, **headers) -> list[list[str]]:
    answer = client.get(LEDGER, HTTP_ACCEPT="text/csv", **headers)
    assert answer.status_code == 200
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    return list(csv.reader(io.StringIO(b"".join(answer.streaming_content).decode())))


class TestAccount:
    def test_both_surfaces_show_the_same(self, session, public, user):
        fund(user, 12_500_000)
        place(user, 2_000_001)
        expected = {"balance": "12.5", "held": "2.000001", "available": "10.499999", "expiring": []}
        for client, surface in ((session, "/api/v1"), (public, "/api/public/v1")):
            answer = client.get(surface + ACCOUNT)
            assert (answer.status_code, answer.json()) == (200, expected)

    def test_a_debt_is_a_negative_balance(self, session, user):
        fund(user, -1_250_000)
        shown = session.get("/api/v1" + ACCOUNT).json()
        assert shown == {"balance": "-1.25", "held": "0", "available": "-1.25", "expiring": []}


class TestLedger:
    def test_rows_newest_first(self, session, user):
        spent = spend(user, 3 * CREDIT, run="run_1", chat="chat_1", tool="draw_chart")
        refund = ledger.refund(spent.pk, 1_500_000, reason="Half of it", staff=clerk())
        ledger.adjust(user.pk, -1, reason="Rounding", staff=clerk())
        spend(UserFactory(), 5)
        body = session.get(LEDGER).json()
        assert body["nextCursor"] is None
        assert [(row["type"], row["amount"]) for row in body["items"]] == [
            ("ADJUSTMENT", "-0.000001"),
            ("REFUND", "1.5"),
            ("CAPTURE", "3"),
            ("HOLD", "3"),
            ("GRANT", "100"),
        ]
        assert body["items"][1] == {
            "id": refund.pk,
            "type": "REFUND",
            "amount": "1.5",
            "toolKey": "draw_chart",
            "chatId": "chat_1",
            "runId": "run_1",
            "invocationId": spent.invocation_id,
            "reason": "Half of it",
            "reference": None,
            "expiresAt": None,
            "createdAt": iso(refund.created_at),
            "balanceAfter": "98.5",
        }
        assert [row["balanceAfter"] for row in body["items"]] == ["98.499999", "98.5", "97", "100", "100"]
        assert body["items"][4]["toolKey"] is None

    def test_all_pages_together_are_the_whole_ledger(self, session, user):
        for _ in range(4):
            ledger.capture(place(user, 8), 3)  # CAPTURE and RELEASE have the same time
        whole = [row["id"] for row in session.get(LEDGER, {"limit": 100}).json()["items"]]
        assert len(whole) == 13
        joined, balances, cursor = [], [], None
        while True:
            page = session.get(LEDGER, {"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
            joined += [row["id"] for row in page["items"]]
            balances += [row["balanceAfter"] for row in page["items"]]
            cursor = page["nextCursor"]
            turn(user, 1)  # new rows must not shift the pages
            if cursor is None:
                break
        assert joined == whole
        assert balances == [row["balanceAfter"] for row in session.get(LEDGER, {"limit": 100}).json()["items"]][-13:]

    def test_a_page_of_earlier_days_has_the_same_balances(self, session, user, monkeypatch):
        travel = stop_clock(monkeypatch, clock.now())
        for _ in range(4):
            turn(user, 1)
            travel.now += timedelta(days=1)
        whole = session.get(LEDGER, {"limit": 100}).json()["items"]
        balances, cursor = [], {}
        while cursor is not None:
            page = session.get(LEDGER, {"limit": 1} | cursor).json()
            balances += [row["balanceAfter"] for row in page["items"]]
            cursor = page["nextCursor"] and {"cursor": page["nextCursor"]}
        assert balances == [row["balanceAfter"] for row in whole]

    @pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"cursor": "x"}])
    def test_invalid_page_parameters_are_400(self, session, query):
        answer = session.get(LEDGER, query)
        assert answer.status_code == 400
        assert list(answer.json()["error"]["details"]["fields"]) == list(query)

    def test_queries_do_not_grow_with_rows(self, session, user, django_assert_num_queries):
        for _ in range(2):
            with django_assert_num_queries(3):
                session.get(LEDGER)
            for _ in range(5):
                spend(user, 1)


class TestCsv:
    def test_contains_every_row_of_the_caller(self, session, user, monkeypatch):
        monkeypatch.setattr(
            usage, "EXPORT_BATCH", 2
        )  # A batch ends between a CAPTURE and its RELEASE, which have the same time.
        for _ in range(4):
            ledger.capture(place(user, 8), 3)
        spend(UserFactory(), 5)
        header, *lines = read_csv(session)
        assert header == COLUMNS
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        listing = session.get(LEDGER, {"limit": 100}).json()["items"]
        assert rows == [{column: value or "" for column, value in row.items()} for row in listing]
        assert len(rows) == 13

    def test_rows_are_read_in_batches_while_they_are_sent(self, session, user, monkeypatch, request):
        """At most one batch is read ahead, and sent rows do not stay in memory."""
        monkeypatch.setattr(usage, "EXPORT_BATCH", 4)
        monkeypatch.setattr(serializers, "ROWS_AT_ONCE", 1)
        for number in range(26):
            ledger.grant(user.pk, 1, cause=f"{number}")
        made: weakref.WeakSet[LedgerEntry] = weakref.WeakSet()

        def remember(instance: LedgerEntry, **kwargs: object) -> None:
            made.add(instance)

        post_init.connect(remember, sender=LedgerEntry)
        request.addfinalizer(lambda: post_init.disconnect(remember, sender=LedgerEntry))
        with CaptureQueriesContext(connection) as queries:
            answer = session.get(LEDGER, HTTP_ACCEPT="text/csv")
            sent = 0
            for _ in answer.streaming_content:  # one row each, the first after the header
                sent += 1
                assert len(queries) <= 2 + 1 + (sent - 1) // 4  # the first two: authentication and balance
                assert len(made) <= 2 * 4
        assert sent == 27

    def test_is_a_download_and_is_not_cached(self, session):
        answer = session.get(LEDGER, HTTP_ACCEPT="text/csv")
        assert answer["Content-Disposition"] == 'attachment; filename="ledger.csv"'
        assert answer["Cache-Control"] == "no-store"

    def test_names_from_elsewhere_cannot_be_formulas(self, session, user):
        ledger.grant(user.pk, 1, cause="x", reference="=1+1")
        spend(user, 1, tool="@draw")
        header, *lines = read_csv(session)
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        assert {(row["reference"], row["toolKey"]) for row in rows} >= {("'=1+1", ""), ("", "'@draw")}

    def test_free_text_is_quoted_and_cannot_be_a_formula(self, session, user):
        formulas = ['=HYPERLINK("http://x")', "+1", "-1", "@x", "\uff1d1", "\uff20x"]
        texts = ['says "no", twice', "two\r\nlines", "; =", "größer €"]
        for reason in formulas + texts:
            ledger.adjust(user.pk, -5, reason=reason, staff=clerk())
        rows = [dict(zip(COLUMNS, line, strict=True)) for line in read_csv(session)[1:-1]]
        assert [row["reason"] for row in reversed(rows)] == [f"'{text}" for text in formulas] + texts
        assert {row["amount"] for row in rows} == {"-0.000005"}

    def test_errors_are_json(self, client, user):
        answer = client.get(LEDGER, HTTP_ACCEPT="text/csv")
        assert answer.status_code == 401
        assert answer["Content-Type"] == "application/json"
        assert answer.json()["error"]["code"] == "UNAUTHORIZED"

    def test_a_refused_method_is_json_too(self, session):
        answer = session.post(LEDGER, HTTP_ACCEPT="text/csv")
        assert (answer.status_code, answer["Content-Type"]) == (405, "application/json")

    @pytest.mark.parametrize(("error", "status"), [(OperationalError("away"), 503), (Conflict(), 409)])
    def test_an_error_after_the_type_was_chosen_is_json_too(self, session, monkeypatch, error, status):
        def fail(user_id):
            raise error

        monkeypatch.setattr(usage, "export", fail)
        answer = session.get(LEDGER, HTTP_ACCEPT="text/csv")
        assert (answer.status_code, answer["Content-Type"]) == (status, "application/json")
        assert list(answer.json()) == ["error"]

    def test_other_types_are_406(self, session):
        answer = session.get(LEDGER, HTTP_ACCEPT="text/html")
        assert answer.status_code == 406
        assert answer.json()["error"]["code"] == "NOT_ACCEPTABLE"

    def test_a_rate_limited_export_is_a_json_429(self, session, monkeypatch, settings):
        from config.api import ratelimit

        def refuse(*args, **kwargs):
            raise ratelimit.RateLimited

        monkeypatch.setattr(ratelimit, "charge_caller", refuse)
        answer = session.get(LEDGER, HTTP_ACCEPT="text/csv")
        assert (answer.status_code, answer["Content-Type"]) == (429, "application/json")
        assert answer.json()["error"]["code"] == "RATE_LIMITED"


def test_rows_of_one_millisecond_keep_their_order(session, user):
    entries = [ledger.grant(user.pk, 1, cause=f"{number}") for number in range(30)]
    listing = [row["id"] for row in session.get(LEDGER, {"limit": 30}).json()["items"]]
    expected = LedgerEntry.objects.order_by("-created_at", "-id").values_list("pk", flat=True)
    assert listing == list(expected[:30])
    assert set(listing) == {entry.pk for entry in entries}
