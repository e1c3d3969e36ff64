"""A user's page, and the search field that opens it."""

import json
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from apikeys import keys
from tests import factories
from tests.admin.conftest import CONTENT, SECRET, make_run
from tests.admin.test_find import scans

pytestmark = pytest.mark.django_db

FIND = reverse("find")


def page_of(user: Any) -> str:
    return reverse("person", args=[user.pk])


@pytest.fixture
def ada():
    user = factories.UserFactory(username="ada", email="ada@example.com")
    keys.create_key(user, name="ci")
    make_run(
        user,
        agent="support@2",
        agent_name="support",
        status="failed",
        error_code="MODEL_ERROR",
        failure_reason="provider_unauthorized",
    )
    return user


@pytest.mark.parametrize("role", ["viewer", "support", "billing"])
def test_the_page_shows_what_each_role_needs(sign_in, ada, role):
    client = sign_in(role)
    assert client.get(FIND, {"q": "ada"})["Location"] == page_of(ada)
    page = client.get(page_of(ada))
    text = page.content.decode()
    assert f'"{reverse("admin:credits_ledgerentry_changelist")}?account__user__id__exact={ada.pk}">Ledger<' in text
    assert dict(page.context["panels"]["account"])["Balance"] == "98.25"
    assert page.context["panels"]["spend"]["total"] == "1.75 credits"
    assert page.context["panels"]["used"] == [("Models", [("demo", 1)]), ("Agents", [("support", 1)])]
    assert "MODEL_ERROR" in text
    assert page.context["panels"]["failures"][0][2]
    assert "awk_" in text
    assert CONTENT not in text
    assert SECRET not in text
    offered = {"billing": ["Grant credits", "Adjust account"], "support": ["Export"]}
    assert [button["title"] for button in page.context["actions_detail"]] == offered.get(role, [])
    assert ("Refund</a>" in text) == (role == "billing")


def test_the_page_needs_permissions(sign_in, ada):
    assert sign_in().get(page_of(ada)).status_code == 403
    page = sign_in(permissions=("auth.view_user",)).get(page_of(ada))
    assert page.context["panels"] == {}
    assert sign_in("viewer").get(reverse("person", args=[10**30])).status_code == 404


def test_the_page_takes_a_fixed_number_of_queries_that_use_indexes(boss, ada):
    def queries() -> list[str]:
        with CaptureQueriesContext(connection) as asked:
            assert boss.get(page_of(ada)).status_code == 200
        return [query["sql"] for query in asked.captured_queries]

    queries()
    before = queries()
    for _ in range(3):
        make_run(ada, turns=2)
        keys.create_key(ada, name="other")
    assert len(queries()) == len(before) <= 16
    for sql in before:
        if sql.startswith("SELECT"):
            assert not scans(sql, browsing=" LIMIT " in sql), sql
        # What callers give can have megabytes, and the models of many runs are counted.
        assert not any(f'"runs_run"."{name}"' in sql for name in ("client_tools", "output_schema", "instructions"))


def test_enter_opens_the_only_hit(sign_in, ada):
    viewer = sign_in("viewer")
    for word in ("ada", "ad", "ada@example.com", "ADA@example.com", str(ada.pk), " ada "):
        assert viewer.get(FIND, {"q": word})["Location"] == page_of(ada), word
    run = ada.runs.get()
    assert viewer.get(FIND, {"q": run.pk})["Location"] == reverse("admin:runs_run_change", args=[run.pk])
    factories.UserFactory(username="adam", email="adam@example.com")
    assert [label for label, _ in viewer.get(FIND, {"q": "ad"}).context["hits"]] == [
        "ada ada@example.com",
        "adam adam@example.com",
    ]
    assert viewer.get(FIND, {"q": "ada"})["Location"] == page_of(ada)


def test_the_search_says_when_it_found_nothing(boss, ada):
    for word in ("", "nobody", "x" * 5000, "\0ada\0x", "%", "9" * 30, "run_", "_", "'; --"):
        assert "Nothing found" in boss.get(FIND, {"q": word}).content.decode(), word


def test_the_search_shows_users_only_to_those_who_may_see_them(sign_in, ada):
    assert "Nothing found" in sign_in().get(FIND, {"q": "ada"}).content.decode()
    assert get_user_model()._default_manager.filter(username="ada").exists()


def test_every_page_has_the_search_field(sign_in, ada):
    client = sign_in("viewer")
    for page in (reverse("admin:index"), reverse("admin:runs_run_changelist"), page_of(ada)):
        assert f'action="{FIND}"' in client.get(page).content.decode()


def do(client: Any, user: Any, name: str, **data: str) -> Any:
    return client.post(reverse("admin:auth_user_do_one", args=[user.pk, name]), data | {"step": "confirm"})


def test_a_user_with_any_name_is_blocked_and_unblocked_and_never_renamed(boss, sign_in):
    user = factories.UserFactory(username="auth0|5a620d29a840170a9ef43672")
    session = factories.session_client(user)
    assert do(sign_in("support"), user, "block").status_code == 403
    assert do(boss, user, "block")["Location"] == page_of(user)
    assert session.get("/api/v1/me").status_code == 401
    page = boss.get(page_of(user))
    titles = [button["title"] for button in page.context["actions_detail"]]
    assert ("Block" in titles, "Unblock" in titles) == (False, True)
    do(boss, user, "unblock")
    assert session.get("/api/v1/me").status_code == 200
    assert [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")] == ["Blocked.", "Unblocked."]
    form = boss.get(reverse("admin:auth_user_change", args=[user.pk])).context["adminform"].form
    given = {name: value for name, value in form.initial.items() if value} | {"email": "a@example.com"}
    given |= {"username": "mallory", "date_joined_0": "2026-11-21", "date_joined_1": "12:00:00"}
    assert boss.post(reverse("admin:auth_user_change", args=[user.pk]), given).status_code == 302
    user.refresh_from_db()
    assert (user.username, user.email) == ("auth0|5a620d29a840170a9ef43672", "a@example.com")
    assert do(boss, boss.person, "block").status_code == 302
    boss.person.refresh_from_db()
    assert boss.person.is_active


def test_an_export_is_confirmed_logged_and_for_those_who_may_read_content(sign_in, ada):
    assert do(sign_in("billing"), ada, "export").status_code == 403
    support = sign_in("support")
    address = reverse("admin:auth_user_do_one", args=[ada.pk, "export"])
    assert CONTENT not in support.get(address).content.decode()
    answer = do(support, ada, "export")
    lines = [json.loads(line) for line in b"".join(answer.streaming_content).splitlines()]
    assert CONTENT in json.dumps(lines)
    assert {line["table"] for line in lines} >= {"auth_user", "credits_ledgerentry", "chats_message"}
    assert LogEntry.objects.get().get_change_message() == "Exported."


@pytest.mark.django_db(transaction=True)
def test_a_long_erasure_says_how_far_it_is_and_continues(boss, ada, monkeypatch):
    make_run(ada)
    monkeypatch.setattr("runs.admin.person.ERASE_SECONDS", -1)
    begun = do(boss, ada, "erase", reason="case 7").content.decode()
    assert "Not everything is erased yet. So far: 1 of 2 chats deleted." in begun
    assert 'value="case 7"' in begun
    ada.refresh_from_db()
    assert (ada.username, ada.is_active) == ("ada", False)
    monkeypatch.undo()
    assert do(boss, ada, "erase", reason="case 7").status_code == 302
    assert not ada.runs.exists()


@pytest.mark.django_db(transaction=True)
def test_an_erasure_without_a_run_worker_ends_its_request_in_time(boss, ada, monkeypatch):
    factories.RunFactory(chat__user=ada, status="running", worker_id="wrk_gone")
    monkeypatch.setattr("runs.admin.person.ERASE_SECONDS", 1)
    monkeypatch.setattr("runs.privacy.ERASE_WAIT_SECONDS", 5)
    assert "So far: 0 of 1 runs ended." in do(boss, ada, "erase", reason="case 7").content.decode()


@pytest.mark.django_db(transaction=True)
def test_staff_erase_a_user_and_the_log_says_who(boss, sign_in, ada):
    assert do(sign_in("support"), ada, "erase", reason="case 7").status_code == 403
    refused = do(boss, ada, "erase", reason="wish of ada")
    assert "must not contain the username" in refused.content.decode()
    assert do(boss, ada, "erase", reason="case 7").status_code == 302
    ada.refresh_from_db()
    assert ada.username.startswith("erased-")
    assert f"{ada.username}: Erased." in boss.get(page_of(ada)).content.decode()
    assert not ada.runs.exists()
    entry = LogEntry.objects.get(object_id=str(ada.pk))
    assert (entry.user, entry.get_change_message()) == (boss.person, "Erased: case 7")
    assert do(boss, boss.person, "erase", reason="case 8").status_code in (200, 302)
    boss.person.refresh_from_db()
    assert boss.person.is_active
