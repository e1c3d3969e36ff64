"""The roles of a new installation."""

import re

import pytest
from django.apps import apps
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.test import Client, RequestFactory
from django.urls import reverse

from runs.catalogue import seeds
from tests import factories

pytestmark = pytest.mark.django_db

PAGES = ["runs_run", "chats_chat", "credits_ledgerentry", "webhooks_delivery", "apikeys_apikey", "admin_logentry"]


def permissions(name: str) -> set[str]:
    found = Permission.objects.filter(group__name=name).select_related("content_type")
    return {f"{permission.content_type.app_label}.{permission.codename}" for permission in found}


@pytest.mark.parametrize("name", ["viewer", "support", "billing"])
def test_each_role_has_its_permissions(name):
    assert permissions(name) == set(seeds.ROLES[name])


def test_no_role_has_add_change_or_delete_permissions():
    for name in seeds.ROLES:
        assert not {
            label for label in permissions(name) if label.split(".")[1].split("_")[0] in ("add", "change", "delete")
        }


@pytest.mark.parametrize("name", ["viewer", "support", "billing"])
def test_every_role_opens_the_pages_it_may_view(sign_in, name):
    client = sign_in(name)
    dashboard = client.get(reverse("admin:index")).content.decode()
    assert "Runs by state" in dashboard
    assert "Oldest queued run" in dashboard
    for page in PAGES:
        assert client.get(reverse(f"admin:{page}_changelist")).status_code == 200
    assert client.get(reverse("admin:auth_group_changelist")).status_code == 403
    assert reverse("admin:auth_group_changelist") not in dashboard


def test_staff_without_a_role_see_no_models(sign_in):
    client = sign_in()
    assert "Ask for a role" in client.get(reverse("admin:index")).content.decode()
    assert client.get(reverse("admin:runs_run_changelist")).status_code == 403


def test_changes_of_staff_to_a_role_are_kept():
    viewer = Group.objects.get(name="viewer")
    viewer.permissions.clear()
    seeds.install_roles(Group, Permission)
    assert permissions("viewer") == set()


def test_a_user_is_added_and_gets_a_role(boss):
    """Uses the forms in the steps of docs/admin.md."""
    password = "correct horse battery"
    form = boss.get(reverse("admin:auth_user_add")).content.decode()
    assert {"username", "password1", "password2"} <= set(re.findall(r'name="(\w+)"', form))
    answer = boss.post(
        reverse("admin:auth_user_add"), {"username": "olga", "password1": password, "password2": password}
    )
    # Users of the API appear with their first request. Staff get no sign-up credits.
    assert get_user_model().objects.get(username="olga").is_staff
    page = boss.get(answer["Location"])
    assert {"is_staff", "groups", "user_permissions"} <= set(re.findall(r'name="(\w+)"', page.content.decode()))
    given = {name: value for name, value in page.context["adminform"].form.initial.items() if value is not None}
    given |= {"is_staff": "on", "groups": [Group.objects.get(name="support").pk], "user_permissions": []}
    given |= {"date_joined_0": "2026-11-21", "date_joined_1": "12:00:00"}
    assert boss.post(answer["Location"], given).status_code == 302
    olga = Client()
    assert olga.login(request=RequestFactory().post("/"), username="olga", password=password)
    assert olga.get(reverse("admin:runs_run_changelist")).status_code == 200
    assert olga.get(reverse("admin:auth_user_add")).status_code == 403


def test_a_user_of_the_api_is_not_staff(client):
    user = factories.UserFactory()
    client.force_login(user)
    assert client.get(reverse("admin:index")).status_code == 302


@pytest.mark.django_db(transaction=True)
def test_the_migration_creates_the_roles_before_any_permission_exists():
    """In a new database Django creates the permissions only after all migrations."""
    Group.objects.all().delete()
    Permission.objects.all().delete()
    executor = MigrationExecutor(connection)
    state = executor.loader.project_state([("runs", "0002_seeds")]).apps
    migration = executor.loader.get_migration("runs", "0002_seeds")
    with connection.schema_editor() as editor:
        migration.operations[1].code(state, editor)
    for name, wanted in seeds.ROLES.items():
        assert permissions(name) == set(wanted)
    assert apps.get_model("auth", "Permission").objects.filter(codename="cancel_run").count() == 1
