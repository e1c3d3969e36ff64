"""What lists show: short ids and whole times; and the error pages."""

import pytest
from django.urls import reverse

from tests.admin.conftest import make_run

pytestmark = pytest.mark.django_db


def test_a_list_shows_short_ids_and_whole_times_and_leads_to_the_user(boss, user):
    run = make_run(user)
    page = boss.get(reverse("admin:runs_run_changelist")).content.decode()
    short = f'title="{run.pk}">run_…{run.pk[-6:]}</a>'
    assert short in page
    assert f"{run.created_at:%Y-%m-%d %H:%M:%S}" in page
    assert f'<a href="{reverse("person", args=[user.pk])}" class="staff-user">{user.username}</a>' in page
    calls = boss.get(reverse("admin:runs_toolinvocation_changelist")).content.decode()
    assert short in calls


def test_the_error_pages_lead_back(sign_in, client):
    viewer = sign_in("viewer")
    for path, status in ((reverse("admin:auth_group_changelist"), 403), ("/admin/nothing/here/", 404)):
        answer = viewer.get(path)
        assert answer.status_code == status
        assert f'href="{reverse("admin:index")}"' in answer.content.decode()
    assert "/admin/" not in client.get("/nothing/here").content.decode()
