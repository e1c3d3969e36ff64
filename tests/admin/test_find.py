"""Search in the admin uses indexes, and a list page never counts its rows."""

import re
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from apikeys import keys
from config.staff.base import PAGE_SIZE, PAGES_MAX
from credits.models import LedgerEntry
from runs.models import ToolInvocation, Waitpoint
from tests import factories
from tests.admin.conftest import make_run, unknown
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db

RUNS = reverse("admin:runs_run_changelist")


def found(client: Any, word: str, listing: str = RUNS) -> list[str]:
    """Return the ids of the rows that a search for ``word`` lists."""
    page = client.get(f"{listing}{'&' if '?' in listing else '?'}{urlencode({'q': word})}")
    assert page.status_code == 200
    return [row.pk for row in page.context["cl"].result_list]


@pytest.fixture
def run(user):
    make_run(factories.UserFactory())
    return make_run(user, status="failed", error_code="MODEL_TIMEOUT")


def test_a_run_is_found_by_each_of_its_identifiers(boss, user, run):
    words = [
        run.pk,
        run.chat_id,
        run.user_message_id,
        ToolInvocation.objects.get(run=run).pk,
        Waitpoint.objects.get(run=run).pk,
        user.username,
        user.email.upper(),
        str(user.pk),
        "MODEL_TIMEOUT",
        "model_timeout",
        f"{user.username} MODEL_TIMEOUT",
    ]
    assert {word: found(boss, word) for word in words} == {word: [run.pk] for word in words}


def test_an_unknown_id_finds_nothing(boss, run):
    for prefix in ("run", "chat", "msg", "inv", "wp", "usr"):
        assert found(boss, unknown(prefix)) == [], prefix


def test_unusual_search_words_find_nothing_without_an_error(boss, run):
    for word in ("nobody", "x" * 5000, "%", "9" * 30, "run_", "'; --", "a b c d e f g h"):
        assert found(boss, word) == [], word
    assert boss.get(RUNS, {"q": "\0run"}, follow=True).status_code == 200


def test_two_words_that_match_no_common_row_find_nothing(boss, user, run):
    assert found(boss, f"{user.username} MODEL_ERROR") == []


def test_rows_of_other_models_are_found(boss, user, run):
    delivery = Delivery.objects.get(run_id=run.pk)
    call = ToolInvocation.objects.get(run=run)
    key, secret = keys.create_key(user, name="ci")
    held = LedgerEntry.objects.get(type="HOLD", invocation_id=call.pk)
    listing = {
        name: reverse(f"admin:{name}_changelist")
        for name in ("webhooks_delivery", "credits_ledgerentry", "apikeys_apikey", "chats_chat",
                     "webhooks_endpoint", "runs_toolinvocation", "credits_account", "auth_user")
    }  # fmt: skip
    for word in (delivery.pk, delivery.event_id, run.pk, user.username):
        assert found(boss, word, listing["webhooks_delivery"]) == [delivery.pk]
    ledger_rows = listing["credits_ledgerentry"]
    assert len(found(boss, run.pk, ledger_rows)) == 2  # usage and capture, with their holds and the release
    assert len(found(boss, run.pk, f"{ledger_rows}?holds=all")) == 5
    assert found(boss, call.pk, ledger_rows) == [LedgerEntry.objects.get(type="CAPTURE", invocation_id=call.pk).pk]
    assert held.pk in found(boss, call.pk, f"{ledger_rows}?holds=all")
    assert found(boss, held.pk, ledger_rows) == [held.pk]
    for word in (key.pk, key.prefix, secret, user.username):
        assert found(boss, word, listing["apikeys_apikey"]) == [key.pk]
    assert found(boss, run.chat_id, listing["chats_chat"]) == [run.chat_id]
    assert found(boss, delivery.endpoint_id, listing["webhooks_endpoint"]) == [delivery.endpoint_id]
    assert found(boss, run.pk, listing["runs_toolinvocation"]) == [call.pk]
    assert found(boss, user.email, listing["credits_account"]) == [user.pk]
    assert found(boss, user.username, listing["auth_user"]) == [user.pk]


def test_filters_by_state_and_error(boss, run):
    assert [row.pk for row in boss.get(RUNS, {"status__exact": "failed"}).context["cl"].result_list] == [run.pk]
    assert [row.pk for row in boss.get(RUNS, {"error_code": "MODEL_TIMEOUT"}).context["cl"].result_list] == [run.pk]
    assert list(boss.get(RUNS, {"error_code": "MODEL_ERROR"}).context["cl"].result_list) == []


def test_hidden_fields_cannot_be_used_as_filters(boss, run):
    password = "user__password__startswith=p"
    for name, queries in {
        "apikeys_apikey": ["digest__startswith=a", password],
        "webhooks_endpoint": ["secret__gt=a", password],
        "chats_chat": ["title__contains=a", password],
        "runs_run": ["error_message=x", "chat__title__contains=a", password],
        "runs_tool": ["secret_headers__isnull=0"],
        "credits_ledgerentry": ["against__reason__contains=x", f"account__{password}"],
    }.items():
        for query in queries:
            answer = boss.get(f"{reverse(f'admin:{name}_changelist')}?{query}", follow=True)
            refused = answer.status_code == 400 or "e=1" in answer.request["QUERY_STRING"]
            assert refused, (name, query, answer.status_code)


def test_a_nul_character_causes_no_server_error(boss, run):
    assert boss.get(RUNS + "?status__exact=%00", follow=True).status_code == 200
    assert boss.get("/admin/runs/run/run_%00/change/").status_code == 302
    assert boss.get("/admin/runs/run/run_%00/do/cancel/").status_code == 404


@pytest.mark.parametrize("key", ["abc", "_00", "9" * 20, "-1"])
def test_the_page_of_an_unknown_row_leads_to_the_dashboard(boss, key):
    for model in admin.site._registry:
        page = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[key])
        assert boss.get(page).status_code == 302, page


def test_the_next_page_needs_no_count(boss, user):
    factories.RunFactory.create_batch(PAGE_SIZE + 1, chat=factories.ChatFactory(user=user))
    with CaptureQueriesContext(connection) as asked:
        page = boss.get(RUNS)
    assert len(page.context["cl"].result_list) == PAGE_SIZE
    assert not [query for query in asked.captured_queries if "COUNT(" in query["sql"].upper()]
    assert len(boss.get(RUNS, {"p": 2}).context["cl"].result_list) == 1
    assert boss.get(RUNS, {"p": PAGES_MAX + 1}).status_code == 302


# --- query plans -----------------------------------------------------------------------------------------------------
SEARCHES = [
    ("runs_run", "{run.pk}"),
    ("runs_run", "{run.chat_id}"),
    ("runs_run", "{user.username}"),
    ("runs_run", "MODEL_TIMEOUT"),
    ("runs_run", "{run.user_message_id}"),
    ("runs_run", ""),
    ("runs_run", "?status__exact=waiting"),
    ("runs_run", "?error_code=MODEL_TIMEOUT"),
    ("runs_turn", "{run.pk}"),
    ("runs_toolinvocation", "{run.pk}"),
    ("runs_waitpoint", "{run.pk}"),
    ("runs_runevent", "{run.pk}"),
    ("chats_chat", "{user.username}"),
    ("chats_chat", ""),
    ("chats_attachment", "{user.username}"),
    ("apikeys_apikey", "awk_0123"),
    ("apikeys_apikey", "{user.username}"),
    ("credits_account", "{user.username}"),
    ("credits_ledgerentry", ""),
    ("credits_ledgerentry", "{run.pk}"),
    ("credits_ledgerentry", "{call.pk}"),
    ("credits_ledgerentry", "{user.username}"),
    ("webhooks_endpoint", "{user.username}"),
    ("webhooks_delivery", "{run.pk}"),
    ("webhooks_delivery", "{user.username}"),
    ("webhooks_delivery", ""),
]
BIG = re.compile(r"runs_|chats_|credits_|webhooks_|apikeys_")
# SQLite names a table by its alias in a subquery.
SCANNED = re.compile(rf"{BIG.pattern}|SCAN [A-Z]\d+\b")


def test_every_search_uses_an_index(boss, user, run):
    """No step of a query plan scans a growing table. The first page may read one in the order of an index."""
    names = {"run": run, "user": user, "call": run.invocations.get(), "delivery": Delivery.objects.get(run_id=run.pk)}
    for listing, given in SEARCHES:
        word, url = given.format(**names), reverse(f"admin:{listing}_changelist")
        with CaptureQueriesContext(connection) as asked:
            boss.get(url + word if word.startswith("?") else url, {"q": word} if word[:1] not in ("", "?") else {})
        queries = [query["sql"] for query in asked.captured_queries if query["sql"].startswith("SELECT")]
        assert any(BIG.search(sql) for sql in queries), (listing, given)
        for sql in queries:
            wrong = scans(sql, browsing=not word)
            assert not wrong, f"{listing}, {given}: {sql}\n{wrong}"


def scans(sql: str, *, browsing: bool = False) -> list[str]:
    """Return the steps of a query's plan that scan a growing table.

    ``browsing`` allows a scan in the order of an index, as the limit of the first page ends it early.
    """
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
            steps = cursor.fetchall()
            if browsing and " LIMIT " in sql and not any("TEMP B-TREE FOR ORDER BY" in step[3] for step in steps):
                for_each_row = {step[0] for step in steps if step[3].startswith("CORRELATED")}
                steps = [step for step in steps if step[1] in for_each_row]
            return [step[3] for step in steps if step[3].startswith("SCAN") and SCANNED.search(step[3])]
        # The tables of a test are small, so the planner would choose a sequential scan.
        ways = ("enable_seqscan", "enable_mergejoin", "enable_hashjoin")
        for way in ways:
            cursor.execute(f"SET LOCAL {way} = off")
        # Without statistics the planner assumes larger tables.
        cursor.execute("UPDATE pg_class SET relpages = 0, reltuples = -1 WHERE relnamespace = 'public'::regnamespace")
        cursor.execute(f"EXPLAIN {sql if browsing else sql.rpartition(' ORDER BY ')[0] or sql}")
        lines = "\n".join(row[0] for row in cursor.fetchall())
        for way in ways:
            cursor.execute(f"SET LOCAL {way} = on")
    steps = [step for step in re.split(r"\n *->|^", lines) if re.search(r"Scan[^\n]* on ", step) and BIG.search(step)]
    return [step for step in steps if "Seq Scan" in step or not (browsing or "Cond:" in step)]


@pytest.mark.parametrize("model", ["runs_tool", "runs_agent", "runs_agentmodel", "runs_provider", "auth_group"])
def test_a_list_without_a_search_field_ignores_words(boss, model):
    assert boss.get(reverse(f"admin:{model}_changelist"), {"q": "abc"}).status_code == 200
