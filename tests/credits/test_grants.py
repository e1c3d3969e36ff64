"""The credits of users, for the app's backend: grants, revocations and reading, with a server key."""

import contextlib
from datetime import timedelta
from urllib.parse import quote

import pytest
from django.contrib.auth import get_user_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rest_framework.test import APIClient

from config.api import session_tokens
from config.kernel import clock
from config.kernel.clock import iso
from credits import grants, ledger
from credits.grants import expire_grants, left_of
from credits.models import Account, LedgerEntry
from credits.reconcile import drift
from tests import factories
from tests.credits.helpers import CREDIT, Clock, clerk, fund, place, spend, state, stop_clock
from tests.credits.test_concurrency import side_by_side
from tests.tiers import examples

HOUR = timedelta(hours=1)


@pytest.fixture
def shop(db) -> APIClient:
    return factories.server_client("credits")


def give(shop: APIClient, sub: str, amount: str = "25", reference: str = "pay_1", **body):
    body = {"amount": amount, "reference": reference, "reason": "25 credits"} | body
    return shop.post(f"/api/v1/users/{sub}/credits/grants", body, format="json")


def take(shop: APIClient, sub: str, ledger_id: str, reference: str = "refund_1", **body):
    body = {"reference": reference, "reason": "Charge-back"} | body
    return shop.post(f"/api/v1/users/{sub}/credits/grants/{ledger_id}/revoke", body, format="json")


class TestGrants:
    def test_a_payment_is_granted_to_a_user_who_was_never_seen(self, shop):
        answer = give(shop, "auth0|4711", expiresAt="2027-01-31T00:00:00.123+01:00")
        assert answer.status_code == 201, answer.json()
        row = answer.json()
        assert row == {
            "id": row["id"],
            "type": "GRANT",
            "amount": "25",
            "toolKey": None,
            "chatId": None,
            "runId": None,
            "invocationId": None,
            "reason": "25 credits",
            "reference": "pay_1",
            "expiresAt": "2027-01-30T23:00:00.123Z",
            "createdAt": row["createdAt"],
            "balanceAfter": "125",
        }
        assert "Idempotent-Replayed" not in answer
        shown = shop.get("/api/v1/users/auth0|4711/credits").json()
        expiring = [{"amount": "25", "at": "2027-01-30T23:00:00.123Z"}]
        assert shown == {"balance": "125", "held": "0", "available": "125", "expiring": expiring}
        token = factories.server_client().post("/api/v1/session-tokens", {"sub": "auth0|4711"}, format="json").json()
        client = APIClient(headers={"Authorization": f"Bearer {token['token']}"})
        assert client.get("/api/v1/me/credits").json() == shown
        rows = client.get("/api/v1/me/credits/ledger").json()
        assert rows["items"][0] == row
        assert shop.get("/api/v1/users/auth0|4711/credits/ledger").json() == rows

    def test_the_same_reference_is_the_same_grant_for_ever(self, shop, user, monkeypatch):
        first = give(shop, user.username)
        spend(user, CREDIT)
        stop_clock(monkeypatch, clock.now() + timedelta(days=4000))
        again = give(shop, user.username, reason="Another text")
        assert (again.status_code, again["Idempotent-Replayed"], again.json()) == (200, "true", first.json())
        assert LedgerEntry.objects.filter(reference="pay_1").count() == 1
        other = factories.UserFactory()
        for refused in (
            give(shop, other.username),
            give(shop, user.username, amount="26"),
            give(shop, user.username, expiresAt=iso(clock.now() + HOUR)),
        ):
            assert refused.status_code == 409
            assert refused.json()["error"]["details"] == {"ledgerId": first.json()["id"]}
        assert state(other) == (100 * CREDIT, 0)

    def test_a_replay_is_the_first_answer_whatever_was_under_way_then(self, shop, user, monkeypatch):
        stop_clock(monkeypatch, clock.now())
        first = give(shop, user.username)
        stop_clock(monkeypatch, clock.now() - timedelta(milliseconds=1))
        spend(user, CREDIT)
        assert give(shop, user.username).json() == first.json()

    def test_an_account_can_have_more_than_one_grant_may_give(self, shop, user):
        first = give(shop, user.username, amount="1000000000")
        assert (first.status_code, first.json()["balanceAfter"]) == (201, "1000000100")
        again = give(shop, user.username, amount="1000000000")
        assert (again.status_code, again.json()) == (200, first.json())

    def test_a_replay_after_the_expiry_is_no_error(self, shop, user, monkeypatch):
        end = iso(clock.now() + HOUR)
        give(shop, user.username, expiresAt=end)
        stop_clock(monkeypatch, clock.now() + 2 * HOUR)
        assert give(shop, user.username, expiresAt=end).status_code == 200

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("amount", value) for value in (25, "0", "-1", "0.0000001", "1e400", "NaN", "", None, "x" * 99999, [])),
            *(("amount", value) for value in ("1e2", "1_000", "+5", " 5", "5\n", "5.", ".5", "1.0.0", "\u0665", "²")),
            *(("amount", f"{whole}.{'0' * 30}1") for whole in (0, 1, 10**9)),
            ("amount", f"0.{'9' * 40}"),
            *(("reference", value) for value in ("", "x" * 201, 5, None)),
            *(("reason", value) for value in ("", "x" * 201, 5, None)),
            *(("expiresAt", value) for value in ("soon", "2027-01-31T00:00:00", "2099-01-01T00:00:00Z", 5, "")),
            ("expiresAt", "2020-01-01T00:00:00Z"),
            ("ammount", "5"),
        ],
    )
    def test_a_wrong_field_is_400_and_grants_nothing(self, shop, user, field, value):
        answer = give(shop, user.username, **{field: value})
        assert answer.status_code == 400, answer.json()
        assert list(answer.json()["error"]["details"]["fields"]) == [field]
        assert state(user) == (100 * CREDIT, 0)

    def test_other_credentials_and_scopes_are_refused(self, user, session, public):
        for client, status in (
            (APIClient(), 401),
            (session, 401),
            (public, 401),
            (factories.server_client("session-tokens"), 403),
        ):
            assert give(client, user.username).status_code == status
            assert client.get(f"/api/v1/users/{user.username}/credits").status_code == status
            assert take(client, user.username, "led_x").status_code == status
        shop = factories.server_client("credits")
        assert shop.post("/api/v1/session-tokens", {"sub": "ada"}, format="json").status_code == 403
        assert shop.get("/api/v1/me/credits").status_code == 401
        assert state(user) == (100 * CREDIT, 0)

    def test_a_key_with_both_scopes_does_both(self, user):
        backend = factories.server_client("credits", "session-tokens")
        assert give(backend, user.username).status_code == 201
        assert backend.post("/api/v1/session-tokens", {"sub": user.username}, format="json").status_code == 201

    @pytest.mark.parametrize("sub", ["x" * 151, "x" * 255, " padded ", "sub-42"])
    def test_a_subject_that_is_no_username_is_the_user_of_its_tokens(self, shop, sub):
        """Events and TOP_UP_URL show that user's username, which is an id here too."""
        client = APIClient(headers={"Authorization": f"Bearer {session_tokens.mint(sub, 1)}"})
        username = client.get("/api/v1/me").json()["username"]
        assert username != sub
        for number, name in enumerate((sub, username)):
            assert give(shop, quote(name), reference=f"pay_{number}").status_code == 201
        assert client.get("/api/v1/me/credits").json()["balance"] == "150"
        assert get_user_model().objects.count() == 1

    @pytest.mark.parametrize("sub", ["boss", "x" * 256, "%00", "x" * 10000])
    def test_staff_and_impossible_names_are_404(self, shop, sub):
        factories.UserFactory(username="boss", is_staff=True)
        assert give(shop, sub).status_code == 404
        assert give(shop, sub, amount="none").status_code == 404
        assert shop.get(f"/api/v1/users/{sub}/credits").status_code == 404

    def test_each_call_is_logged_without_names(self, shop, caplog):
        with caplog.at_level("INFO", logger="credits.views"):
            give(shop, "canary-name")
        assert [record.getMessage().partition(":")[2] for record in caplog.records] != []
        assert "canary" not in caplog.text

    def test_reading_usage(self, shop, user):
        spend(user, 3 * CREDIT, tool="draw_chart")
        path = f"/api/v1/users/{user.username}/credits/usage-summary"
        assert shop.get(path, {"period": "all"}).json()["totalDebitedAll"] == "3"
        assert shop.get(path, {"period": "never"}).status_code == 400

    @pytest.mark.django_db(transaction=True)
    def test_sixteen_calls_at_once_are_one_grant(self, user):
        other = factories.UserFactory()
        answers = []

        def call(number: int) -> None:
            owner = user if number % 4 else other
            try:
                answers.append(
                    grants.grant(owner.pk, 25, reference="pay_1", reason="25 credits", expires_at=None)[0].pk
                )
            except ledger.Conflict as error:
                answers.append(error.details["ledgerId"])

        side_by_side(16, call)
        assert len(answers) == 16
        assert len(set(answers)) == LedgerEntry.objects.filter(reference="pay_1").count() == 1
        assert sum(Account.objects.values_list("balance", flat=True)) == 200 * CREDIT + 25
        assert list(drift()) == []

    def test_an_idempotency_key_repeats_the_first_answer(self, shop, user):
        path, key = f"/api/v1/users/{user.username}/credits/grants", {"Idempotency-Key": "k1"}
        body = {"amount": "25", "reference": "pay_1", "reason": "25 credits"}
        first, again = (shop.post(path, body, format="json", headers=key) for _ in range(2))
        assert (again.status_code, again["Idempotent-Replayed"], again.json()) == (201, "true", first.json())
        other = shop.post(path, body | {"reference": "pay_2"}, format="json", headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
        refund = {"reference": "refund_1", "reason": "Refund", "mode": "unspent"}
        taken = [
            shop.post(f"{path}/{first.json()['id']}/revoke", refund, format="json", headers={"Idempotency-Key": "k2"})
            for _ in range(2)
        ]
        assert taken[0].json() == taken[1].json() == {"revoked": "25", "balance": "100"}
        assert state(user) == (100 * CREDIT, 0)


class TestRevocations:
    def test_unspent_takes_what_is_left(self, shop, user):
        fund(user, 0)
        bought = give(shop, user.username).json()["id"]
        spend(user, 10 * CREDIT)
        answer = take(shop, user.username, bought)
        assert (answer.status_code, answer.json()) == (200, {"revoked": "15", "balance": "0"})
        give(shop, user.username, reference="pay_2")
        again = take(shop, user.username, bought, mode="all", reason="Other")
        assert (again["Idempotent-Replayed"], again.json()) == ("true", answer.json())
        row = LedgerEntry.objects.get(reference="refund_1")
        assert (row.type, row.amount, row.against_id) == ("ADJUSTMENT", -15 * CREDIT, bought)
        # Another refund of the same payment: all that is left of it is what was spent.
        assert take(shop, user.username, bought, "refund_2").json() == {"revoked": "0", "balance": "25"}
        assert take(shop, user.username, bought, "refund_3", mode="all").json() == {"revoked": "10", "balance": "15"}
        assert list(drift()) == []

    def test_all_takes_the_spent_part_too(self, shop, user):
        fund(user, 0)
        bought = give(shop, user.username).json()["id"]
        spend(user, 10 * CREDIT)
        assert take(shop, user.username, bought, mode="all").json() == {"revoked": "25", "balance": "-10"}
        assert list(drift()) == []

    def test_what_is_held_stays_until_it_is_settled(self, shop, user):
        fund(user, 0)
        bought = give(shop, user.username).json()["id"]
        hold = place(user, 20 * CREDIT)
        assert take(shop, user.username, bought).json() == {"revoked": "5", "balance": "20"}
        ledger.capture(hold, 0)
        assert take(shop, user.username, bought, "refund_2").json() == {"revoked": "20", "balance": "0"}

    def test_what_expired_is_not_taken_again(self, shop, user, monkeypatch):
        fund(user, 0)
        bought = give(shop, user.username, expiresAt=iso(clock.now() + HOUR)).json()["id"]
        spend(user, 10 * CREDIT)
        stop_clock(monkeypatch, clock.now() + 2 * HOUR)
        assert sum(expire_grants()) == 15 * CREDIT
        assert take(shop, user.username, bought).json() == {"revoked": "0", "balance": "0"}
        assert take(shop, user.username, bought, "refund_2", mode="all").json() == {"revoked": "10", "balance": "-10"}

    def test_only_a_grant_of_this_user_can_be_revoked(self, shop, user):
        other = factories.UserFactory()
        foreign = LedgerEntry.objects.get(account_id=other.pk).pk
        for ledger_id in (foreign, spend(user, 5).pk, "led_unknown", "%00", "x" * 10000):
            assert take(shop, user.username, ledger_id).status_code == 404
            assert take(shop, user.username, ledger_id, mode="half").status_code == 404
        own = LedgerEntry.objects.get(account_id=user.pk, type="GRANT").pk
        for wrong in ({"mode": "half"}, {"reason": ""}, {"reference": ""}, {"amount": "5"}):
            assert take(shop, user.username, own, **wrong).status_code == 400

    @pytest.mark.parametrize("mode", ["unspent", "all"])
    @pytest.mark.django_db(transaction=True)
    def test_revoking_beside_spending_is_exact(self, user, mode):
        fund(user, 0)
        given = ledger.grant(user.pk, 100, cause="payment")
        spent, revoked = [], []

        def call(number: int) -> None:
            if number == 8:
                answer, _ = grants.revoke(given, reference="r", reason="Charge-back", mode=mode)
                revoked.append(answer)
                return
            with contextlib.suppress(ledger.InsufficientCredits):
                spent.append(spend(user, 10).amount)

        side_by_side(16, call)
        row = LedgerEntry.objects.get(reference="r")
        assert state(user) == (100 - sum(spent) + row.amount, 0)
        assert row.amount == -100 or (mode == "unspent" and state(user)[0] == 0)
        assert list(drift()) == []


class Book:
    """The same rules on a list of single micro-credits: who paid for which, and what is left."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}  # by grant, in order of creation; "" holds what no grant brought
        self.ends: dict[str, int | None] = {}
        self.debt = 0

    def add(self, name: str, amount: int, end: int | None) -> None:
        covered = min(self.debt, amount)
        self.debt -= covered
        self.left[name], self.ends[name] = amount - covered, end

    def spend(self, amount: int) -> None:
        order = sorted(self.left, key=lambda name: (self.ends[name] is None, self.ends[name] or 0))  # stable
        for name in order:
            used = min(self.left[name], amount)
            self.left[name] -= used
            amount -= used
        self.debt += amount

    def take(self, name: str, amount: int) -> None:
        own = min(self.left[name], amount)
        self.left[name] -= own
        self.spend(amount - own)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(1, 30), st.sampled_from([None, 1, 2, 3])),
        st.tuples(st.just("spend"), st.integers(1, 30)),
        st.tuples(st.just("fine"), st.integers(1, 30)),
        st.tuples(st.just("refund")),
        st.tuples(st.just("revoke"), st.integers(0, 9), st.sampled_from(["unspent", "all"])),
    ),
    max_size=14,
)
BOUGHT_TWICE = [("grant", 10, None), ("grant", 20, None), ("spend", 4), ("revoke", 1, "all"), ("grant", 5, 1)]
REVOKED_LATE = [("grant", 10, 1), ("spend", 10), ("grant", 5, 2), ("grant", 7, None), ("revoke", 0, "all")]
REVOKED_TWICE = [("grant", 10, None), ("grant", 9, None), ("revoke", 0, "unspent"), ("spend", 3)]


@pytest.mark.django_db
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
@example(BOUGHT_TWICE)
@example(REVOKED_LATE)
@example(REVOKED_TWICE)
def test_what_is_revoked_is_what_a_book_of_single_credits_says(monkeypatch, steps):
    user, book, now = factories.UserFactory(), Book(), Clock(clock.now())
    monkeypatch.setattr(clock, "now", now)
    fund(user, 0)
    given: list[tuple[LedgerEntry, int]] = []
    for number, (kind, *arguments) in enumerate(steps):
        now.now += timedelta(milliseconds=1)
        if kind == "grant":
            amount, hours = arguments
            end = None if hours is None else now.now + hours * HOUR
            row = ledger.grant(user.pk, amount, cause=f"{user.pk}:{number}", expires_at=end)
            book.add(row.pk, amount, hours and hours * 10**9 + number)
            given.append((row, amount))
        elif kind == "spend" and (amount := min(arguments[0], ledger.account_for(user.pk).available)) > 0:
            spend(user, amount)
            book.spend(amount)
        elif kind == "fine":
            ledger.adjust(user.pk, -arguments[0], reason="Fine", staff=clerk())
            book.spend(arguments[0])
        elif kind == "refund":
            charge = LedgerEntry.objects.filter(account_id=user.pk, type="CAPTURE", answers=None).last()
            if charge is not None:
                row = ledger.refund(charge.pk, charge.amount, reason="Sorry", staff=clerk())
                book.add(row.pk, charge.amount, None)
        elif kind == "revoke" and given:
            which, mode = arguments
            row, rest = given[which % len(given)]
            expected = rest if mode == "all" else min(book.left[row.pk], rest)
            answer, _ = grants.revoke(row, reference=str(number), reason="Back", mode=mode)
            taken = -LedgerEntry.objects.get(against=row, reference=str(number)).amount
            assert taken == expected, (answer, book.left)
            book.take(row.pk, taken)
            given[which % len(given)] = row, rest - taken
    balance = ledger.account_for(user.pk).balance
    assert balance == sum(book.left.values()) - book.debt
    assert [left_of(row, balance) for row, _ in given] == [book.left[row.pk] for row, _ in given]
    assert list(drift()) == []
