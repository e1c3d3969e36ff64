"""What lists show: short ids, relative times, names of the sidebar, their own texts if empty; and the error pages."""

from datetime import timedelta

import pytest
from django.conf import settings
from django.urls import reverse

from config.kernel import clock
from config.staff.base import ago
from tests import factories
from tests.admin.conftest import make_run

pytestmark = pytest.mark.django_db

RUNS = reverse("admin:runs_run_changelist")


def test_ids_are_short_and_can_be_copied(boss, user):
    run = make_run(user)
    page = boss.get(RUNS).content.decode()
    assert f'title="{run.pk}">run_…{run.pk[-6:]}</a>' in page
    assert f'<a href="{reverse("person", args=[user.pk])}" class="staff-user">{user.username}</a>' in page
    assert f'data-copy="{run.pk}"' in page
    assert reverse("admin:runs_run_change", args=[run.pk]) in page
    calls = boss.get(reverse("admin:runs_toolinvocation_changelist")).content.decode()
    assert f">run_…{run.pk[-6:]}</a>" in calls


def test_times_are_relative_with_the_whole_time_beside(boss, user):
    now = clock.now()
    ages = {"5 s ago": 5, "3 min 5 s ago": 185, "2 h 1 min ago": 7300, "in 1 h 1 min": -3700}
    assert {ago(now - timedelta(seconds=seconds)): seconds for seconds in ages.values()} == ages
    assert ago(now - timedelta(days=3)) == f"{now - timedelta(days=3):%Y-%m-%d}"
    run = factories.RunFactory(created_at=now - timedelta(minutes=7))
    page = boss.get(RUNS).content.decode()
    assert f'title="{run.created_at:%Y-%m-%d %H:%M:%S} UTC">7 min 0 s ago</time>' in page


def test_a_list_is_called_as_in_the_sidebar(boss):
    entries = [entry for group in settings.STAFF_NAVIGATION.values() for entry in group]
    assert len(entries) >= 20
    for name, _, model in entries:
        page = boss.get(reverse(f"admin:{model.replace('.', '_')}_changelist")).content.decode()
        heading = page[page.index("<header") if "<header" in page else 0 :]
        assert f'truncate tracking-tight">{name}</a>'.replace("'", "&#x27;") in heading, model
        assert "Authentication" not in page, model


def test_an_empty_list_says_why_it_is_empty(boss):
    assert "A run appears when a user sends a message." in boss.get(RUNS).content.decode()
    page = boss.get(RUNS, {"q": "nobody"}).content.decode()
    assert "Nothing found." in page
    assert "Show all rows" in page


def test_the_error_pages_lead_back_and_name_who_can_help(sign_in):
    boss = sign_in(superuser=True).person
    denied = sign_in("viewer").get(reverse("admin:auth_group_changelist"))
    assert denied.status_code == 403
    missing = sign_in("viewer").get("/admin/nothing/here/")
    assert missing.status_code == 404
    for page in (denied, missing):
        assert f'href="{reverse("admin:index")}"' in page.content.decode()
    assert boss.username in denied.content.decode()
    assert boss.username not in missing.content.decode()


@pytest.mark.parametrize("key", ["abc", "9" * 25, "-1", "\0"])
def test_a_checkbox_that_is_no_row_chooses_nothing(boss, key):
    tools, chosen = reverse("admin:runs_tool_changelist"), {"_selected_action": key}
    answer = boss.post(tools, {"action": "delete_selected", **chosen}, follow=True)
    assert answer.redirect_chain == [(tools, 302)]
    answer = boss.post(reverse("admin:credits_account_do", args=["grant"]), chosen, follow=True)
    assert "Choose a row first." in answer.content.decode()


def test_a_filter_by_a_pattern_is_refused(boss):
    assert boss.get(RUNS, {"status__exact": "failed"}).status_code == 200
    assert boss.get(RUNS, {"status__regex": "("}).status_code == 400
