"""The usage reports over HTTP."""

from datetime import timedelta

import pytest

from chats.services import delete_chat, make_chat
from config.kernel import clock
from config.kernel.clock import iso
from credits import ledger
from credits.usage import display_names
from runs.models import Tool
from tests.credits.helpers import CREDIT, Clock, clerk, fund, place, spend, stop_clock, turn
from tests.factories import UserFactory, session_client

pytestmark = pytest.mark.django_db
SUMMARY = "/api/v1/me/credits/usage-summary"
BY_CHAT = "/api/v1/me/credits/usage-entries-by-chat"
BY_DAY = "/api/v1/me/credits/usage-by-day"
OF_CHAT = "/api/v1/me/credits/ledger/chat/"
PERIODIC = [SUMMARY, BY_CHAT, BY_DAY]


@pytest.fixture
def now(monkeypatch, session) -> Clock:
    """A stopped clock. Rows get the time ``now.now``."""
    return stop_clock(monkeypatch, clock.now())


def get(client, path, **query):
    answer = client.get(path, query)
    assert answer.status_code == 200, answer.content
    return answer.json()


class TestSummary:
    def test_groups_by_tool_largest_first(self, session, user, now):
        start = now.now
        fund(user, 1000 * CREDIT)
        turn(user, 1_500_000)
        turn(user, 0)
        spend(user, 12 * CREDIT, tool="draw_chart", run="run_1")
        now.now = start + timedelta(seconds=2)
        spend(user, 1, tool="draw_chart", run="run_2", chat="chat_2")
        refunded = spend(user, 2 * CREDIT, tool="web_fetch")
        ledger.refund(refunded.pk, CREDIT, reason="r", staff=clerk())
        ledger.capture(place(user, 50 * CREDIT, tool="create_file"), 0)
        ledger.capture(place(user, 3 * CREDIT, tool="web_fetch"), CREDIT)
        spend(UserFactory(), 5, tool="draw_chart")
        assert get(session, SUMMARY) == {
            "groups": [
                {
                    "toolKey": "draw_chart",
                    "displayName": "Draw a chart",
                    "totalDebited": "12.000001",
                    "records": 2,
                    "latestUsageAt": iso(now.now),
                },
                {
                    "toolKey": "web_fetch",
                    "displayName": "Fetch a web page",
                    "totalDebited": "3",
                    "records": 2,
                    "latestUsageAt": iso(now.now),
                },
                {
                    "toolKey": "model",
                    "displayName": "Model usage",
                    "totalDebited": "1.5",
                    "records": 2,
                    "latestUsageAt": iso(start),
                },
            ],
            "totalDebitedAll": "16.500001",
            "recordsAll": 6,
            "categoriesCount": 3,
            "periodStart": iso(ledger.account_for(user.pk).created_at),
            "periodEnd": iso(now.now),
        }

    def test_a_user_without_usage(self, session, user, now):
        body = get(session, SUMMARY, period="7d")
        assert body == {
            "groups": [],
            "totalDebitedAll": "0",
            "recordsAll": 0,
            "categoriesCount": 0,
            "periodStart": iso(now.now - timedelta(days=7)),
            "periodEnd": iso(now.now),
        }

    def test_tools_with_equal_cost_are_sorted_by_name(self, session, user, now):
        for tool in ("search", "draw", "mail"):
            spend(user, 5, tool=tool)
        turn(user, 5)
        assert [group["toolKey"] for group in get(session, SUMMARY)["groups"]] == ["draw", "mail", "model", "search"]

    def test_sums_are_exact(self, session, user, now):
        fund(user, 10**15)
        for _ in range(50):
            turn(user, 100_001)
        turn(user, 900_000_000_000_000)
        assert get(session, SUMMARY)["totalDebitedAll"] == "900000005.00005"


class TestPeriods:
    @pytest.mark.parametrize(("period", "days"), [("7d", 7), ("30d", 30), ("90d", 90)])
    def test_the_start_of_a_period_is_exact_to_the_microsecond(self, session, user, now, period, days):
        end = now.now
        fund(user, 1000)
        now.now = end - timedelta(days=days)
        turn(user, 3, chat="chat_in")
        now.now -= timedelta(microseconds=1)
        turn(user, 40, chat="chat_out")
        now.now = end
        turn(user, 500, chat="chat_in")
        assert get(session, SUMMARY, period=period)["totalDebitedAll"] == "0.000503"
        assert get(session, SUMMARY, period=period)["periodStart"] == iso(end - timedelta(days=days))
        entries = get(session, BY_CHAT, period=period)["entries"]
        assert [(entry["chatId"], entry["amount"]) for entry in entries] == [("chat_in", "0.000503")]
        assert sum(day["records"] for day in get(session, BY_DAY, period=period)["days"]) == 2
        assert get(session, SUMMARY, period="all")["totalDebitedAll"] == "0.000543"
        assert len(get(session, BY_CHAT)["entries"]) == 2

    def test_a_boundary_on_a_whole_second_is_exact(self, session, user, now):
        now.now = now.now.replace(microsecond=0)
        end = now.now
        for offset in (timedelta(), timedelta(microseconds=1), -timedelta(microseconds=1)):
            now.now = end - timedelta(days=7) + offset
            turn(user, 1)
        now.now = end
        assert get(session, SUMMARY, period="7d")["recordsAll"] == 2

    @pytest.mark.parametrize("path", PERIODIC)
    def test_all_is_the_default(self, session, user, now, path):
        end = now.now
        now.now = end - timedelta(days=400)
        turn(user, 1)
        now.now = end
        assert get(session, path) == get(session, path, period="all") != get(session, path, period="90d")

    @pytest.mark.parametrize("path", PERIODIC)
    @pytest.mark.parametrize("period", ["", "7", "7D", "1d", "ALL", "7d ", "\0", "x" * 5000])
    def test_any_other_period_is_400(self, session, path, period):
        answer = session.get(path, {"period": period})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "VALIDATION_ERROR"
        assert list(answer.json()["error"]["details"]["fields"]) == ["period"]


class TestByChat:
    def test_sums_all_rows_of_a_chat_newest_activity_first(self, session, user, now):
        start = now.now
        mine, untitled, gone = (make_chat(user, title)[0] for title in ("Mine", None, "Gone"))
        spent = spend(user, 12 * CREDIT, chat=gone.pk)
        delete_chat(gone)
        now.now = start + timedelta(seconds=1)
        spend(user, 3 * CREDIT, chat=mine.pk)
        turn(user, 250_000, chat=mine.pk)
        turn(user, 0, chat=untitled.pk)
        now.now = start + timedelta(seconds=2)
        ledger.refund(spent.pk, 4 * CREDIT, reason="r", staff=clerk())
        place(user, CREDIT, chat=mine.pk)
        assert get(session, BY_CHAT) == {
            "entries": [
                {"chatId": gone.pk, "chatTitle": "Gone", "amount": "8", "timestamp": iso(now.now)},
                *sorted(
                    [
                        {
                            "chatId": mine.pk,
                            "chatTitle": "Mine",
                            "amount": "3.25",
                            "timestamp": iso(start + timedelta(seconds=1)),
                        },
                        {
                            "chatId": untitled.pk,
                            "chatTitle": None,
                            "amount": "0",
                            "timestamp": iso(start + timedelta(seconds=1)),
                        },
                    ],
                    key=lambda entry: entry["chatId"],
                ),
            ]
        }

    def test_every_chat_has_its_title(self, session, user, now, monkeypatch):
        monkeypatch.setattr("chats.services.TITLES_BY_ID_MOST", 2)
        chats = [make_chat(user, f"Chat {number}")[0] for number in range(5)]
        for chat in chats[:4]:
            spend(user, 5, chat=chat.pk)
        delete_chat(chats[0])
        titles = {entry["chatId"]: entry["chatTitle"] for entry in get(session, BY_CHAT)["entries"]}
        assert titles == {chat.pk: chat.title for chat in chats[:4]}

    def test_only_chats_of_the_caller_are_listed(self, session, user, now):
        spend(UserFactory(), 5)
        assert get(session, BY_CHAT) == {"entries": []}


class TestOfChat:
    def test_one_row_per_tool_and_run(self, session, user, now):
        start = now.now
        chat = make_chat(user, "Sales")[0]
        first = spend(user, 12 * CREDIT, chat=chat.pk, run="run_1", tool="draw_chart")
        spend(user, 1 * CREDIT, chat=chat.pk, run="run_1", tool="draw_chart")
        now.now = start + timedelta(seconds=1)
        turn(user, 500_000, chat=chat.pk, run="run_1", index=1)
        turn(user, 500_000, chat=chat.pk, run="run_1", index=2)
        now.now = start + timedelta(seconds=2)
        spend(user, 2 * CREDIT, chat=chat.pk, run="run_2", tool="draw_chart")
        now.now = start + timedelta(seconds=3)
        ledger.refund(first.pk, 12 * CREDIT, reason="r", staff=clerk())
        spend(user, 5, chat="chat_other")
        assert get(session, OF_CHAT + chat.pk) == {
            "chatTitle": "Sales",
            "items": [
                {"runId": "run_1", "toolName": "draw_chart", "amount": "1", "timestamp": iso(now.now)},
                {
                    "runId": "run_2",
                    "toolName": "draw_chart",
                    "amount": "2",
                    "timestamp": iso(start + timedelta(seconds=2)),
                },
                {"runId": "run_1", "toolName": None, "amount": "1", "timestamp": iso(start + timedelta(seconds=1))},
            ],
        }

    def test_a_deleted_chat_is_still_reported(self, session, user, now):
        chat = make_chat(user, "Gone")[0]
        spend(user, CREDIT, chat=chat.pk)
        delete_chat(chat)
        body = get(session, OF_CHAT + chat.pk)
        assert body["chatTitle"] == "Gone"
        assert [item["amount"] for item in body["items"]] == ["1"]

    def test_another_users_chat_is_empty(self, session, user, now):
        other = UserFactory()
        chat = make_chat(other, "Theirs")[0]
        spend(other, 5, chat=chat.pk)
        assert get(session, OF_CHAT + chat.pk) == {"chatTitle": None, "items": []}
        assert get(session_client(other), OF_CHAT + chat.pk)["chatTitle"] == "Theirs"

    @pytest.mark.parametrize("chat", ["chat_none", "%00", "%F0%9F%90%99", "x" * 5000, "%20", "'"])
    def test_any_other_id_is_a_chat_without_usage(self, session, chat):
        assert get(session, OF_CHAT + chat) == {"chatTitle": None, "items": []}


class TestByDay:
    def test_utc_days_oldest_first(self, session, user, now):
        end = now.now
        midnight = end.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=3)
        now.now = midnight - timedelta(microseconds=1)
        turn(user, 1)
        now.now = midnight
        turn(user, 20)
        refunded = spend(user, 300)
        ledger.refund(refunded.pk, 100, reason="r", staff=clerk())
        now.now = end
        assert get(session, BY_DAY, period="30d") == {
            "days": [
                {"date": f"{midnight - timedelta(days=1):%Y-%m-%d}", "totalDebited": "0.000001", "records": 1},
                {"date": f"{midnight:%Y-%m-%d}", "totalDebited": "0.00032", "records": 2},
            ]
        }


@pytest.mark.parametrize("path", [*PERIODIC, OF_CHAT + "chat_1"])
def test_a_session_token_is_required(client, public, path):
    for answer in (client.get(path), public.get(path)):
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "UNAUTHORIZED"


@pytest.mark.parametrize("path", [*PERIODIC, OF_CHAT + "chat_1", "/api/v1/me/credits/ledger"])
def test_api_keys_have_no_access_to_reports(public, path):
    answer = public.get(path.replace("/api/v1/", "/api/public/v1/"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(("path", "queries"), [(SUMMARY, 4), (BY_CHAT, 3), (BY_DAY, 2), (OF_CHAT + "chat_1", 3)])
def test_queries_do_not_grow_with_rows(session, user, django_assert_num_queries, path, queries):
    for round in range(2):
        for number in range(1 + 5 * round):
            spend(user, 5, chat=f"chat_{number}", run=f"run_{number}", tool=f"tool_{number}")
        with django_assert_num_queries(queries):
            get(session, path)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("draw_map", "Draw map"),
        ("web-search", "Web search"),
        ("calculate", "Calculate"),
        ("measure", "Measure"),
        ("getHTMLPage", "GetHTMLPage"),
        ("model", "Model usage"),
        ("__", "__"),
    ],
)
def test_display_names(key, name):
    assert display_names([key])[key] == name


def test_the_bill_has_the_names_of_the_catalogue(session, user):
    Tool.objects.create(name="get_weather", display_name="Weather", enabled=False, node_type="http", price=0)
    fund(user, 10)
    spend(user, 2, tool="get_weather")
    (group,) = get(session, "/api/v1/me/credits/usage-summary")["groups"]
    assert (group["toolKey"], group["displayName"]) == ("get_weather", "Weather")
