"""The roles viewer, support and billing."""

from django.apps import apps as installed
from django.conf import settings
from django.contrib.auth.management import create_permissions
from django.db import migrations

from runs import roles

APPS = ["admin", "apikeys", "auth", "chats", "credits", "runs", "webhooks"]


def make(apps, schema_editor):
    # Django makes permissions once all migrations are done, which is too late for these groups.
    for label in APPS:
        create_permissions(
            installed.get_app_config(label), verbosity=0, using=schema_editor.connection.alias, apps=apps
        )
    roles.install(apps.get_model("auth", "Group"), apps.get_model("auth", "Permission"))


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0005_staff"),
        ("apikeys", "0002_staff"),
        ("chats", "0004_staff"),
        ("credits", "0003_staff"),
        ("webhooks", "0003_staff"),
        ("admin", "0003_logentry_add_action_flag_choices"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]
    operations = [migrations.RunPython(make, migrations.RunPython.noop)]
