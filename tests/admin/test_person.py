"""A user's page, and the search field that opens it."""

from __future__ import annotations

from typing import Any

import pytest
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
    page = client.get(page_of(ada))
    text = page.content.decode()
    assert dict(page.context["panels"]["account"])["Balance"] == "98.25"
    assert page.context["panels"]["spend"]["total"] == "1.75 credits"
    assert page.context["panels"]["models"] == [("demo", 1)]
    assert page.context["panels"]["agents"] == [("support", 1)]
    assert "MODEL_ERROR" in text
    assert page.context["panels"]["failures"][0][2]
    assert "awk_" in text
    assert CONTENT not in text
    assert SECRET not in text
    assert [label for label, _ in page.context["actions"]] == (
        ["Grant credits", "Adjust account"] if role == "billing" else []
    )


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


@pytest.mark.parametrize("word", ["", "nobody", "x" * 5000, "\0ada\0x", "%", "9" * 30, "run_", "_", "'; --"])
def test_the_search_says_when_it_found_nothing(boss, ada, word):
    assert "Nothing found" in boss.get(FIND, {"q": word}).content.decode()


def test_the_search_shows_users_only_to_those_who_may_see_them(sign_in, ada):
    assert "Nothing found" in sign_in().get(FIND, {"q": "ada"}).content.decode()
    assert get_user_model()._default_manager.filter(username="ada").exists()


def test_every_page_has_the_search_field(sign_in, ada):
    client = sign_in("viewer")
    for page in (reverse("admin:index"), reverse("admin:runs_run_changelist"), page_of(ada)):
        assert f'action="{FIND}"' in client.get(page).content.decode()
